"""Our format through the eyes of torch.distributed.checkpoint: its planner deals chunks out and finds those to read.

`PartsReader` makes a checkpoint readable for anything that works on torch.distributed.checkpoint:
`torch.distributed.checkpoint.load(state, storage_reader=PartsReader(folder))`. Nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.parts import StoredTensors, dtype_named
from paceline.checkpoint.stored import Stored
from paceline.errors import CheckpointError
from paceline.state.chunks import ChunkBounds, TensorMeta


def deal(
    metas: Mapping[str, TensorMeta], wanted: Sequence[Mapping[str, ChunkBounds]], *, spread: bool
) -> list[dict[str, ChunkBounds]]:
    """Return for each worker those of its chunks that it is to write, every chunk to one; `spread` evens out their sizes."""
    plans = [
        SavePlan([_item(key, metas[key], bounds) for key, bounds in chunks.items()]) for chunks in wanted
    ]
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=not spread
    )
    try:
        dealt, _ = planner.create_global_plan(plans)
    except ValueError as error:
        raise CheckpointError(
            f"cannot save: the workers' chunks do not make up whole tensors ({str(error)[:300]}). "
            "Every part of the state must be held by a worker of the group."
        ) from error
    return [
        {item.index.fqn: chunks[item.index.fqn] for item in plan.items}
        for plan, chunks in zip(dealt, wanted, strict=True)
    ]


def _item(key: str, meta: TensorMeta, bounds: ChunkBounds) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size(bounds.offset), sizes=torch.Size(bounds.shape))
    data = TensorWriteData(
        chunk=chunk, properties=TensorProperties(dtype=meta.dtype), size=torch.Size(meta.shape)
    )
    # A shard, also where it is the whole: only of those may several workers offer the same.
    return WriteItem(index=MetadataIndex(key, bounds.offset), type=WriteItemType.SHARD, tensor_data=data)


def _metadata_of(stored: Stored) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_named(stored.dtype)),
        size=torch.Size(stored.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(one.offset), sizes=torch.Size(one.shape))
            for one in stored.chunks
        ],
    )


class PartsReader(StorageReader):
    """Reads the tensors of one checkpoint, by the keys of its manifest, in whatever chunks they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifest = Manifest.read(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Stay with the folder that was given."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint holds, from its manifest."""
        del args, kwargs
        stored = self._manifest.tensors
        names = {key: stored[target] for key, target in self._manifest.aliases.items()}
        return Metadata({key: _metadata_of(one) for key, one in (stored | names).items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Need nothing more."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Take the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Take the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for into the memory that the planner gives."""
        with StoredTensors(self._folder, self._manifest) as parts:
            for item in plan.items:
                start = item.storage_index.offset or ()
                offset = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))
                values = parts.read(item.storage_index.fqn, ChunkBounds(offset, tuple(item.lengths)))
                target = planner.resolve_tensor(item)
                target.copy_(values)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a folder is a checkpoint of ours."""
        return (Path(checkpoint_id) / "manifest.json").exists()

"""The tensors of a checkpoint, read chunk by chunk: nobody reads more than what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.dtypes import dtype_named
from paceline.checkpoint.manifest import MODEL_PREFIX, Manifest, part_name
from paceline.checkpoint.stored import Stored, StoredChunk
from paceline.errors import CheckpointError
from paceline.state.chunks import ChunkBounds, TensorMeta


class StoredTensors:
    """The open parts of one checkpoint; a CheckpointError holds the bare reason why something cannot be read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        stored = manifest.tensors
        self._stored = stored | {alias: stored[key] for alias, key in manifest.aliases.items()}
        self.catalogue = {
            key: TensorMeta(one.shape, dtype_named(one.dtype)) for key, one in self._stored.items()
        }
        """What the checkpoint holds, tied weights under each of their keys."""
        self._open: dict[int, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    @property
    def model(self) -> Mapping[str, Tensor]:
        """The whole tensors of the model by name, each read when it is asked for."""
        return _Model(self)

    def check(self) -> None:
        """Raise CheckpointError unless every part holds the chunks that the manifest says; all of them are read."""
        for key, stored in self.manifest.tensors.items():
            for one in stored.chunks:
                self._chunk(key, one)

    def read(self, key: str, bounds: ChunkBounds) -> Tensor:
        """Return the values of a part of a tensor, in memory of their own."""
        stored, target = self._stored[key], self.manifest.aliases.get(key, key)
        for one in stored.chunks:
            if (one.offset, one.shape) == (bounds.offset, bounds.shape):
                return self._chunk(target, one)
        meta = self.catalogue[key]
        values = torch.empty(bounds.shape, dtype=meta.dtype)
        if bounds == ChunkBounds.whole(meta.shape):
            for one in stored.chunks:
                ChunkBounds(one.offset, one.shape).of(values).copy_(self._chunk(target, one))
            return values
        for number, inside, place in self._overlaps(stored, bounds):
            place.of(values).copy_(self._chunk(target, stored.chunks[number], inside))
        return values

    @staticmethod
    def _overlaps(stored: Stored, bounds: ChunkBounds) -> Iterator[tuple[int, ChunkBounds, ChunkBounds]]:
        # Only where chunks are cut anew: loading torch.distributed.checkpoint takes a second.
        from paceline.checkpoint.overlaps import overlaps

        return overlaps(stored, bounds)

    def _chunk(self, key: str, stored: StoredChunk, inside: ChunkBounds | None = None) -> Tensor:
        """Read a stored chunk, or a part of it."""
        name = part_name(stored.part)
        try:
            file = self._file(stored.part)
            if inside is None:
                values = file.get_tensor(key)
            else:
                ends = zip(inside.offset, inside.shape, strict=True)
                values = file.get_slice(key)[tuple(slice(start, start + length) for start, length in ends)]
        # torch opens the file, and says RuntimeError if it is gone by now.
        except (SafetensorError, LookupError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{name} does not hold {key}") from error
        wanted = stored.shape if inside is None else inside.shape
        if tuple(values.shape) != wanted or values.dtype != self.catalogue[key].dtype:
            raise CheckpointError(f"{name} holds another {key} than the manifest says")
        # A copy: what safetensors gives is a map of the file, and a file cut short would kill the process.
        copied: Tensor = values.clone()
        return copied

    def _file(self, part: int) -> Any:
        if part not in self._open:
            path = self.folder / part_name(part)
            self._open[part] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        return self._open[part]


class _Model(Mapping[str, Tensor]):
    """A model's tensors that are read one at a time."""

    def __init__(self, parts: StoredTensors) -> None:
        self._parts = parts
        self._names = [
            key.removeprefix(MODEL_PREFIX) for key in parts.catalogue if key.startswith(MODEL_PREFIX)
        ]

    def __getitem__(self, name: str) -> Tensor:
        key = f"{MODEL_PREFIX}{name}"
        return self._parts.read(key, ChunkBounds.whole(self._parts.catalogue[key].shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

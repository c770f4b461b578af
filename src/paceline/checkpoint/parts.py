"""The tensors of a checkpoint, read chunk by chunk: nobody reads more than what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.formats import FORMATS
from paceline.checkpoint.manifest import MODEL_PREFIX, Manifest
from paceline.checkpoint.stored import StoredChunk
from paceline.errors import CheckpointError, InputError
from paceline.state.chunks import AVERAGE, OPTIMIZER, ChunkBounds, TensorMeta, slot_key

AVERAGED = "averaged"
"""Where a manifest's meta says that the run evaluates averages of the weights."""


class StoredTensors:
    """The open parts of one checkpoint; a CheckpointError holds the bare reason why something cannot be read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._format = FORMATS[manifest.format]
        stored = manifest.tensors
        self._stored = stored | {alias: stored[key] for alias, key in manifest.aliases.items()}
        self.catalogue = {
            key: TensorMeta(one.shape, dtype_named(one.dtype)) for key, one in self._stored.items()
        }
        """What the checkpoint holds, tied weights under each of their keys."""
        self._open: dict[str, Any] = {}
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

    def weights(self, average: bool | None = None) -> Mapping[str, Tensor]:
        """Return the same with the averages of the weights in their place, if so; where it is None, as the run evaluates it.

        What has not been averaged yet, and buffers, are as they are.
        """
        if average and not any(_is_average(key) for key in self.catalogue):
            raise InputError(f"{self.folder} holds no averages of weights. Leave average (--average) out.")
        return _Model(self, averaged=bool(self.manifest.meta.get(AVERAGED)) if average is None else average)

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
        values = torch.empty(bounds.shape, dtype=self.catalogue[key].dtype)
        for one in stored.chunks:
            if (both := _overlap(one, bounds)) is not None:
                inside, place = both
                place.of(values).copy_(self._chunk(target, one, inside))
        return values

    def _chunk(self, key: str, stored: StoredChunk, inside: ChunkBounds | None = None) -> Tensor:
        """Read a stored chunk, or a part of it."""
        name = self._format.part.format(stored.part)
        try:
            file = self._file(name)
            if inside is None or inside.shape == stored.shape:
                values = file.get_tensor(key)
            else:
                ends = zip(inside.offset, inside.shape, strict=True)
                values = file.get_slice(key)[tuple(slice(start, start + length) for start, length in ends)]
        # torch opens the file, and says RuntimeError if it is gone by now.
        except (self._format.error, LookupError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{name} does not hold {key}") from error
        wanted = stored.shape if inside is None else inside.shape
        if tuple(values.shape) != wanted or values.dtype != self.catalogue[key].dtype:
            raise CheckpointError(f"{name} holds another {key} than the manifest says")
        # A copy: what safetensors gives is a map of the file, and a file cut short would kill the process.
        copied: Tensor = values.clone()
        return copied

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(self._format.open_part(self.folder / name))
        return self._open[name]


def _is_average(key: str) -> bool:
    return key.startswith(f"{OPTIMIZER}/") and key.endswith(f"/{AVERAGE}")


def dtype_named(name: str) -> torch.dtype:
    """Return torch's type of a name in a manifest."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"the type {name} of a tensor is not known to torch {torch.__version__}")
    return found


def _overlap(stored: StoredChunk, wanted: ChunkBounds) -> tuple[ChunkBounds, ChunkBounds] | None:
    """Return the part of a tensor that is both stored and wanted, as bounds within the stored chunk and within the wanted one."""
    sides = list(zip(stored.offset, stored.shape, wanted.offset, wanted.shape, strict=True))
    starts = [max(here, there) for here, _, there, _ in sides]
    ends = [min(here + length, there + other) for here, length, there, other in sides]
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    if any(length <= 0 for length in shape):
        return None
    inside = tuple(start - offset for start, offset in zip(starts, stored.offset, strict=True))
    place = tuple(start - offset for start, offset in zip(starts, wanted.offset, strict=True))
    return ChunkBounds(inside, shape), ChunkBounds(place, shape)


class _Model(Mapping[str, Tensor]):
    """A model's tensors that are read one at a time."""

    def __init__(self, parts: StoredTensors, *, averaged: bool = False) -> None:
        self._parts, self._averaged = parts, averaged
        self._names = [
            key.removeprefix(MODEL_PREFIX) for key in parts.catalogue if key.startswith(MODEL_PREFIX)
        ]

    def __getitem__(self, name: str) -> Tensor:
        key = f"{MODEL_PREFIX}{name}"
        if self._averaged:
            weight = self._parts.manifest.aliases.get(key, key).removeprefix(MODEL_PREFIX)
            average = slot_key(weight, AVERAGE)
            key = average if average in self._parts.catalogue else key
        return self._parts.read(key, ChunkBounds.whole(self._parts.catalogue[key].shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

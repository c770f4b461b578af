"""Tensors in files of safetensors. Imports torch only where tensors are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from paceline.checkpoint.file_record import FileRecord
from paceline.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class SafetensorsFormat:
    """A file of safetensors for each part."""

    name = "safetensors"
    part = "part-{}.safetensors"
    error: type[Exception] = SafetensorError

    def holds(self, dtype: torch.dtype) -> bool:
        """Return whether a part can hold numbers of this type."""
        return _name_of(dtype) is not None

    def write_part(self, path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
        """Write tensors, wherever they are, and return what the file is; the disk may not hold it yet."""
        return write_tensors(path, tensors, {"format": "pt"})

    def open_part(self, path: Path) -> AbstractContextManager[Any]:
        """Open a part."""
        opened: AbstractContextManager[Any] = safe_open(path, framework="pt", device="cpu")
        return opened


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write tensors, wherever they are, as one safetensors file, and return what it is.

    safetensors' own writer copies all of them first, and sorts the metadata differently each time, so files differ.
    """
    from paceline.checkpoint.hashed_file import HashedFile

    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    order = sorted(
        tensors, key=lambda name: (-tensors[name].element_size(), name)
    )  # so that numbers are aligned
    start = 0
    for name in order:
        tensor, kind = tensors[name], _name_of(tensors[name].dtype)
        if kind is None:
            raise CheckpointError(
                f"cannot save {name.removeprefix('model/')}: safetensors has no type {tensor.dtype}. Keep it in another type."
            )
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write_tensor(tensors[name])
        return file.record()


@cache
def _name_of(dtype: torch.dtype) -> str | None:
    """Return what safetensors calls a type; None where it has none, or holds several numbers in one of torch's."""
    import torch
    from safetensors.torch import save

    try:
        written = save(
            {"one": torch.empty(0, 1, dtype=dtype)}
        )  # a model may be in the making, of tensors without memory
    except KeyError:
        return None
    told = json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])["one"]
    return told["dtype"] if told["shape"] == [0, 1] else None

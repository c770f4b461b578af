"""Tensors in files of safetensors. Imports torch only where tensors are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from paceline.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class SafetensorsFormat:
    """A file of safetensors for each part."""

    name = "safetensors"
    part = "part-{}.safetensors"
    error: type[Exception] = SafetensorError

    @cache  # noqa: B019  (there is one, in the table)
    def holds(self, dtype: torch.dtype) -> bool:
        """Return whether a part can hold numbers of this type."""
        import torch
        from safetensors.torch import save

        try:
            save({"one": torch.empty(0, dtype=dtype)})
        except KeyError:
            return False
        return True

    def write_part(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors that share no memory; the disk may not hold them yet."""
        write_tensors(path, tensors, {"format": "pt"})

    def open_part(self, path: Path) -> AbstractContextManager[Any]:
        """Open a part."""
        opened: AbstractContextManager[Any] = safe_open(path, framework="pt", device="cpu")
        return opened


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors that share no memory as one safetensors file, into a folder of its own."""
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except KeyError as error:
        name = next((name for name, tensor in tensors.items() if tensor.dtype == error.args[0]), "a tensor")
        raise CheckpointError(
            f"cannot save {name.removeprefix('model/')}: safetensors has no type {error.args[0]}. Keep it in another type."
        ) from error
    if len(metadata) > 1:
        _sort_metadata(path)
    # safetensors makes files that only their owner may read. Some disks know no modes.
    with suppress(PermissionError):
        path.chmod(path.parent.stat().st_mode & 0o666)


def _sort_metadata(path: Path) -> None:
    """Write the metadata of a file in the order of its names: safetensors takes another one each time, and files differ."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:  # else it was written in other words, and stays
            file.seek(8)
            file.write(text.ljust(size))

"""The formats that the tensors of a checkpoint can lie in on the disk. Imports no torch.

A format is a class in a file of its own, and an entry in `FORMATS`. Whatever it is, the folder is committed by one rename, and
`manifest.json` names the format, every file with its sha256, and the chunks that each part holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.checkpoint.file_record import FileRecord
from paceline.checkpoint.safetensors_format import SafetensorsFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Format(Protocol):
    """How the chunks that one worker writes, a part, lie in a file."""

    name: str
    part: str
    """The name of a part's file, with {} for its number."""
    error: type[Exception]
    """What its library raises where it cannot read or write, beside Python's own."""

    def holds(self, dtype: torch.dtype) -> bool:
        """Return whether a part can hold numbers of this type."""

    def write_part(self, path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
        """Write tensors, wherever they are, and return what the file is; the disk may not hold it yet."""

    def open_part(self, path: Path) -> AbstractContextManager[Any]:
        """Open a part: an object with `get_tensor(key)` and `get_slice(key)[slices]`, which read no more than that."""


FORMATS: dict[int, Format] = {2: SafetensorsFormat()}
"""By the number that a manifest has; 1 is read no more."""
WRITTEN = 2
"""The one that is written."""

"""What a file must be to count as undamaged."""

from __future__ import annotations

from typing import NamedTuple


class FileRecord(NamedTuple):
    """The length of a file, and the hash of its bytes."""

    size: int
    sha256: str

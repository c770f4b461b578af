"""A tensor as a checkpoint holds it: its shape and type, and which file has which chunk. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class StoredChunk(NamedTuple):
    """A chunk of a tensor, and the part it lies in."""

    part: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a checkpoint holds it."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it, without "torch."."""
    chunks: tuple[StoredChunk, ...]

    @property
    def values(self) -> int:
        """Return how many numbers it has."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Return how much it is."""
        return self.values * self.itemsize

    @property
    def itemsize(self) -> int:
        """Return the bytes of one number; 0 where several share a byte."""
        bits = re.search(r"\d+", self.dtype)
        return int(bits[0]) // 8 if bits else 1

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> Stored:
        """Return what JSON says of one; whether that can be is for `Manifest.check`."""
        chunks = (StoredChunk(part, tuple(offset), tuple(shape)) for part, offset, shape in entry["boxes"])
        return cls(tuple(entry["shape"]), entry["dtype"], tuple(chunks))

"""What each worker really served: one record a shard a step, in `ledger/rank-R.bin`, made once the step is applied.

A record holds no sample ids, only a digest of them in their order, so it is as short for a shard of 4096 samples
as for an empty one. Each start of a run's processes has a number, its generation, and every record carries it: where
a resumed run takes a step again, the receipt tells which generation's records belong to the weights that came of it.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError

FOLDER = "ledger"
MAGIC = b"paceline-ledger1"
RECORD = np.dtype(
    [
        ("generation", "<u4"),
        ("epoch", "<u4"),
        ("number", "<u8"),
        ("step", "<u8"),
        ("shard", "<u4"),
        ("count", "<u4"),
        ("digest", "<u8", (2,)),
    ]
)
"""`number` counts steps from the beginning of the run, `step` within the epoch."""
FLUSH_S = 1.0
"""A worker that is killed loses the records of its last second at most."""
_GENERATION_BYTES = 4
_pack = struct.Struct("<IIQQII16s").pack

Records: TypeAlias = NDArray[np.void]
Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class Served(Protocol):
    """The part of a shard's work that goes on record."""

    @property
    def index(self) -> int:
        """Which shard."""

    @property
    def samples(self) -> Ids:
        """The ids of its samples, in order."""


def digest(ids: Any) -> bytes:
    """Digest the bytes of int64 sample ids in their order; 16 bytes, so that no two shards are mistaken for each other."""
    return hashlib.blake2b(ids, digest_size=16).digest()


class Ledger:
    """One worker's ledger, open for appending. Records are held for up to a second and written together."""

    def __init__(self, folder: Path, rank: int, generation: int) -> None:
        self.path = folder / FOLDER / f"rank-{rank}.bin"
        self._generation = generation
        self._held = bytearray()
        self._flushed_at = time.monotonic()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._unwritable(error) from error
        self._mend()

    def step(self, number: int, epoch: int, step: int, shards: Iterable[Served]) -> None:
        """Record the shards that this worker served in a step that has been applied."""
        generation, held = self._generation, self._held
        for shard in shards:
            ids = shard.samples
            held += _pack(generation, epoch, number, step, shard.index, len(ids), digest(ids))
        if time.monotonic() - self._flushed_at > FLUSH_S:
            self.flush()

    def flush(self, *, durable: bool = False) -> None:
        """Write what is held; `durable` also waits until the disk has it."""
        self._flushed_at = time.monotonic()
        try:
            while self._held:
                written = os.write(self._file, self._held)
                del self._held[:written]
            if durable:
                os.fsync(self._file)
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Write the rest and let go of the file; a second call does nothing."""
        if self._file < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._file)
            self._file = -1

    def _mend(self) -> None:
        """Begin a new file with its mark; cut off a record that a killed worker left half written."""
        size = os.fstat(self._file).st_size
        if size < len(MAGIC):
            os.ftruncate(self._file, 0)
            os.write(self._file, MAGIC)
        else:
            os.ftruncate(self._file, size - (size - len(MAGIC)) % RECORD.itemsize)

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"the ledger {self.path} cannot be written: {error.strerror}. "
            "Make room or choose another --out; the run can be resumed from its last checkpoint."
        )


def paths(folder: Path) -> dict[int, Path]:
    """Give the ledgers of a run folder by rank."""
    found = {int(path.stem.removeprefix("rank-")): path for path in (folder / FOLDER).glob("rank-*.bin")}
    return dict(sorted(found.items()))


def read(path: Path, start: int = 0) -> Records:
    """Read a ledger's whole records from the one numbered `start` on; a half-written last one is left out."""
    with path.open("rb") as file:
        mark = file.read(len(MAGIC))
        if mark != MAGIC[: len(mark)]:
            raise InputError(f"{path} is no ledger of this version of paceline. Restore it from a copy.")
        file.seek(len(MAGIC) + start * RECORD.itemsize)
        data = file.read()
    return np.frombuffer(data[: len(data) - len(data) % RECORD.itemsize], dtype=RECORD)


def count(path: Path) -> int:
    """Count the whole records of a ledger without reading them."""
    return max(0, path.stat().st_size - len(MAGIC)) // RECORD.itemsize


def belonging(records: Records, steps: Sequence[int], generations: Sequence[int]) -> NDArray[np.bool_]:
    """Tell which records led to what there is now: from each of the ascending `steps` on, one generation's do."""
    stretch = np.searchsorted(np.array(steps, dtype=np.uint64), records["number"], side="right")
    of_stretch = np.array([-1, *generations], dtype=np.int64)
    return np.asarray(of_stretch[stretch] == records["generation"].astype(np.int64))


def chain(link: bytes, records: Records, shards: int, steps: range) -> bytes | None:
    """Carry the hash chain over some steps: each link hashes the one before and the step's records in order of shard.

    Who served a shard and in which generation does not enter it. None where not each shard of each step is there once.
    """
    chosen = records[(records["number"] >= steps.start) & (records["number"] < steps.stop)]
    chosen = chosen[np.lexsort((chosen["shard"], chosen["number"]))]
    cells = chosen["number"] * np.uint64(shards) + chosen["shard"]
    if not np.array_equal(cells, np.arange(steps.start * shards, steps.stop * shards, dtype=np.uint64)):
        return None
    rows = np.ascontiguousarray(chosen).view(np.uint8).reshape(-1, RECORD.itemsize)
    text = rows[:, _GENERATION_BYTES:].tobytes()
    width = (RECORD.itemsize - _GENERATION_BYTES) * shards
    for place in range(0, len(text), width):
        link = hashlib.sha256(link + text[place : place + width]).digest()
    return link

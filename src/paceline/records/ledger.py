"""What each process really served: one record a shard a step, in `ledger/rank-R-from-G.bin`, made before the step begins.

The file bears the rank and the generation at which its process opened it, and nobody else ever writes to it. A record
holds no sample ids, only a digest of them in their order, so it is as short for a shard of 4096 samples as for an empty
one. Each start of a run, and each new group of its workers, has a number, its generation, and every record carries it:
where a step was taken again, the receipt tells which generation's records belong to the weights that came of it.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline import documents
from paceline.errors import InputError, RecordsError

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
MIN_RESERVED = 2**16
MAX_RESERVED = 2**20
"""So many bytes are reserved at once: as many as there are already, between these two."""
_SIZE = RECORD.itemsize
_BLOCK = 2**16
"""So many records are read at once: 3 MB."""
_GENERATION_BYTES = 4
_NAME = re.compile(r"rank-([0-9]{1,9})(?:-from-([0-9]{1,9}))?\.bin")
_pack_into = struct.Struct("<IIQQII16s").pack_into
"""Fills a record in this order, so that the digest comes last: no half of it is zero but once in 2**63."""

Records: TypeAlias = NDArray[np.void]
Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class Origin(NamedTuple):
    """Which process a ledger is of: its rank, and the generation in which it had that rank."""

    rank: int
    generation: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (of generation {self.generation})" if self.generation else f"rank {self.rank}"
        )


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
    """One process's ledger, open for appending: into mapped memory, so what is appended outlives the process at once."""

    def __init__(self, folder: Path, rank: int, generation: int) -> None:
        self.path = folder / FOLDER / f"rank-{rank}-from-{generation}.bin"
        self.generation = generation
        """What the next records carry."""
        self._file = -1
        self._window: mmap.mmap | None = None
        self._base = self._at = 0
        """Where in the file the window begins, and where in the window the records end."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            self._at = self._mend()
            self._make_room(0)
        except OSError as error:
            self._release()
            raise _unwritable(self.path, error) from error
        except InputError:
            self._release()
            raise

    def step(self, number: int, epoch: int, step: int, shards: Sequence[Served]) -> None:
        """Record the shards that this worker serves in a step; all of them are there, or none."""
        needed = _SIZE * len(shards)
        window = self._window
        if window is None or self._at + needed > len(window):
            window = self._make_room(needed)
        generation = self.generation
        # Backwards, because a reader ends before the first record without a digest: a kill may come at any store.
        at = end = self._at + needed
        for shard in reversed(shards):
            at -= _SIZE
            ids = shard.samples
            _pack_into(window, at, generation, epoch, number, step, shard.index, len(ids), digest(ids))
        self._at = end

    def flush(self) -> None:
        """Wait until the disk has everything; the kernel has it anyway."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        """Cut off the bytes that were not used, and close the file; a second call does nothing."""
        if self._file < 0:
            return
        try:
            os.ftruncate(self._file, self._base + self._at)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        finally:
            self._release()

    def _release(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _mend(self) -> int:
        """Begin a new file with its mark; cut off what a killed process left unfinished. Return where the records end."""
        if os.fstat(self._file).st_size < len(MAGIC):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, MAGIC, 0)
            return len(MAGIC)
        end = len(MAGIC) + len(read(self.path)) * _SIZE
        # What follows must be zero when it is mapped again.
        os.ftruncate(self._file, end)
        return end

    def _make_room(self, needed: int) -> mmap.mmap:
        """Map the end of the file with space for `needed` bytes and many more."""
        end = self._base + self._at
        base = end - end % mmap.ALLOCATIONGRANULARITY
        size = end - base + max(needed, min(MAX_RESERVED, max(MIN_RESERVED, end)))
        try:
            # Without it a full disk would be noticed at a store to memory, and that is a SIGBUS.
            os.posix_fallocate(self._file, base, size)
            window = mmap.mmap(self._file, size, offset=base)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        if self._window is not None:
            self._window.close()
        self._window, self._base, self._at = window, base, end - base
        return window


def check_room(folder: Path) -> None:
    """Raise where the disk has no room for one more ledger; a worker that is to join a group asks before it does."""
    place = folder / FOLDER / f".room-{os.getpid()}"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, MIN_RESERVED)
    except OSError as error:
        raise _unwritable(place, error) from error
    finally:
        place.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> RecordsError:
    saved = any((path.parent.parent / "checkpoints").glob("step-*"))
    remedy = (
        "Make room; the run can then be resumed from its last checkpoint."
        if saved
        else "Make room or choose another --out, and start again: no checkpoint was saved."
    )
    return RecordsError(f"the ledger {path} cannot be written: {error.strerror}. {remedy}")


def paths(folder: Path) -> dict[Origin, Path]:
    """Return the ledgers of a run folder by whose they are; before workers came and went, a name had no generation."""
    named = [(_NAME.fullmatch(path.name), path) for path in (folder / FOLDER).glob("rank-*.bin")]
    return dict(
        sorted(
            (Origin(int(found[1]), int(found[2] or 0)), path) for found, path in named if found is not None
        )
    )


def read(path: Path, start: int = 0) -> Records:
    """Read a ledger's records from the one numbered `start` on, up to the first that was never finished."""
    with _opened(path) as file:
        mark = file.read(len(MAGIC))
        if mark != MAGIC[: len(mark)]:
            raise InputError(f"{path} is no ledger of this version of paceline. Restore it from a copy.")
        first = len(MAGIC) + start * _SIZE
        file.seek(first)
        found: list[Records] = []
        # In blocks, up to where the records end: a file may be made as long as it likes without holding anything.
        while True:
            data = file.read(_BLOCK * _SIZE)
            records = np.frombuffer(data[: len(data) - len(data) % _SIZE], dtype=RECORD)
            finished = _finished(records)
            found.append(records[:finished])
            if finished < _BLOCK:
                break
        if finished == len(records):
            return np.concatenate(found)
        # Once more, because a digest may have come just after the numbers before it were read.
        length = sum(map(len, found)) * _SIZE
        found.clear()
        file.seek(first)
        return np.frombuffer(file.read(length), dtype=RECORD)


def behind_the_end(path: Path, shards: int) -> int:
    """Return how many records there are after the first that was never finished: a kill may leave those of one step."""
    end = len(MAGIC) + len(read(path)) * _SIZE
    with _opened(path) as file:
        # Four times what `_make_room` makes at once: the run may be in progress.
        most = 4 * (max(MAX_RESERVED, shards * _SIZE) + mmap.ALLOCATIONGRANULARITY)
        more = os.fstat(file.fileno()).st_size - end
        if more > most:
            return more // _SIZE
        file.seek(end)
        data = file.read(most)
    records = np.frombuffer(data[: len(data) - len(data) % _SIZE], dtype=RECORD)
    return int((records["digest"] != 0).any(axis=1).sum())


def _finished(records: Records) -> int:
    """Return how many there are before the first that was never finished."""
    unfinished = np.flatnonzero((records["digest"] == 0).any(axis=1))
    return int(unfinished[0]) if len(unfinished) else len(records)


def _opened(path: Path) -> BinaryIO:
    try:
        return documents.open_regular(path)
    except documents.DocumentError as error:
        raise InputError(f"{path} {error}, so it is no ledger. Restore it from a copy.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}). Restore it from a copy.") from error


def capacity(path: Path) -> int:
    """Return how many records fit into a ledger file as it is, used or not."""
    return max(0, path.stat().st_size - len(MAGIC)) // _SIZE


def belonging(records: Records, steps: Sequence[int], generations: Sequence[int]) -> NDArray[np.bool_]:
    """Return which records led to what there is now: from each of the ascending `steps` on, one generation's do."""
    segment = np.searchsorted(np.array(steps, dtype=np.uint64), records["number"], side="right")
    of_segment = np.array([-1, *generations], dtype=np.int64)
    return np.asarray(of_segment[segment] == records["generation"].astype(np.int64))


def chain(link: bytes, records: Records, shards: int, steps: range) -> bytes | None:
    """Carry the hash chain over some steps: each link hashes the one before and the step's records in order of shard.

    Who served a shard and in which generation does not enter it. None where not each shard of each step is there once.
    """
    chosen = records[(records["number"] >= steps.start) & (records["number"] < steps.stop)]
    chosen = chosen[np.lexsort((chosen["shard"], chosen["number"]))]
    if len(chosen) != len(steps) * shards:
        return None
    cells = chosen["number"] * np.uint64(shards) + chosen["shard"]
    if not np.array_equal(cells, np.arange(steps.start * shards, steps.stop * shards, dtype=np.uint64)):
        return None
    rows = np.ascontiguousarray(chosen).view(np.uint8).reshape(-1, _SIZE)
    text = rows[:, _GENERATION_BYTES:].tobytes()
    width = (_SIZE - _GENERATION_BYTES) * shards
    for place in range(0, len(text), width):
        link = hashlib.sha256(link + text[place : place + width]).digest()
    return link

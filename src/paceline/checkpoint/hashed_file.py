"""A file that is hashed while it is written, of tensors that are copied from their device meanwhile."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from types import TracebackType

import torch
from torch import Tensor

from paceline.checkpoint.file_record import FileRecord

_PIECE = 16 << 20
"""Bytes that are written and hashed at once."""
_SMALL = 1 << 18
"""Tensors of fewer bytes are put together before."""
_AHEAD = 4
"""Pieces that may wait to be written and hashed."""


class HashedFile:
    """A new file. Copying, hashing and writing each have a thread of their own, so it takes as long as the slowest of them."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._size = 0
        self._gathered = bytearray()
        self._threads: list[_PieceThread] = []
        self._rooms: list[Tensor] = []
        """Pinned memory for pieces that come from a device."""
        self._turn = 0

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file, once nobody reads the tensors any more."""
        for one in self._threads:
            one.end(given_up=error is not None)
        self._file.close()

    def write(self, data: bytes) -> None:
        """Add some bytes."""
        self._gathered += data
        self._size += len(data)
        if len(self._gathered) >= _PIECE:
            self._flush()

    def write_tensor(self, tensor: Tensor) -> None:
        """Add the bytes of a tensor, which nobody changes until `record` has returned."""
        if tensor.numel() * tensor.element_size() < _SMALL:
            self.write(_bytes_of(tensor.to("cpu")).numpy().tobytes())
            return
        self._flush()
        flat = _bytes_of(tensor)
        self._size += len(flat)
        for start in range(0, len(flat), _PIECE):
            self._add(self._on_cpu(flat[start : start + _PIECE]).numpy().data)

    def record(self) -> FileRecord:
        """Return what the file is, when all is written; the disk may not hold it yet."""
        if self._threads:
            self._flush()
            for one in self._threads:
                one.end()
                one.check()
        else:  # all of it is small
            self._file.write(self._gathered)
            self._digest.update(self._gathered)
        self._file.flush()
        return FileRecord(self._size, self._digest.hexdigest())

    def _flush(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._add(memoryview(gathered))

    def _add(self, piece: memoryview) -> None:
        """Have a piece written and hashed; wait where too many do."""
        self._threads = self._threads or [_PieceThread(self._file.write), _PieceThread(self._digest.update)]
        for one in self._threads:
            one.add(piece)

    def _on_cpu(self, piece: Tensor) -> Tensor:
        """Return a piece in memory that lasts until it is written."""
        if not piece.is_cuda:
            return piece.to("cpu")
        if not self._rooms:
            self._rooms = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(_AHEAD)]
        room = self._rooms[self._turn % _AHEAD][
            : len(piece)
        ]  # whoever had it _AHEAD pieces ago was waited for
        self._turn += 1
        return room.copy_(piece)


class _PieceThread:
    """A thread that does one thing to each piece, in order."""

    def __init__(self, work: Callable[[memoryview], object]) -> None:
        self._work = work
        # Beside those that wait, one is at work, and one is being made.
        self._pieces: Queue[memoryview | None] = Queue(_AHEAD - 2)
        self._failure: BaseException | None = None
        self._given_up = False
        # It must not keep a process alive that has been told to end: whatever it leaves is swept later.
        self._thread = threading.Thread(target=self._run, name="paceline-save-piece", daemon=True)
        self._thread.start()

    def add(self, piece: memoryview) -> None:
        """Hand over a piece; wait where too many do, raise what went wrong with an earlier one."""
        self.check()
        self._pieces.put(piece)

    def check(self) -> None:
        """Raise what went wrong, once: the error holds this thread's frame, and nothing here may hold the error."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def end(self, *, given_up: bool = False) -> None:
        """Wait until all is done, or nothing more where it is `given_up`."""
        self._given_up = self._given_up or given_up
        if self._thread.is_alive():
            self._pieces.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            if not self._given_up:
                try:
                    self._work(piece)
                except BaseException as error:  # noqa: BLE001  (raised again in the thread that hands pieces over)
                    self._failure, self._given_up = error, True


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, where it is; one that lies in pieces is put together on the CPU."""
    bare = tensor.detach()
    if bare.is_conj() or bare.is_neg() or not bare.is_contiguous():
        bare = bare.resolve_conj().resolve_neg().to("cpu").contiguous()
    return bare.reshape(-1).view(torch.uint8)

"""What the launcher's own process does in a chaos run: faults that no worker can set off in itself. Imports no torch.

A worker that comes to the point of such a fault leaves its mark and waits there; a thread beside the launcher sees the mark
and does the rest.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from paceline.launch.workers.roster import NAME as WORKERS
from paceline.verify.chaos.faults import END, FREEZE, LAUNCHERS, PIPE, Fault, Marks
from paceline.verify.chaos.plan import FaultPlan

DONE = "done"
"""The part of such a fault that a worker waits for."""
_LOOK_S = 0.02
_DRAIN_S = 0.2


class Accomplice:
    """A thread that sets off what is due, for as long as the context lasts; each fault has a thread of its own.

    A fault of another kind goes off while one lasts. One of the same kind comes after it: two would undo each other.
    """

    def __init__(self, plan: FaultPlan, marks: Marks, run: Path) -> None:
        """`run` is the folder of the disturbed run."""
        self._waiting = [fault for fault in plan.faults if fault.kind in LAUNCHERS]
        self._marks, self._run = marks, run
        self._ended = threading.Event()
        self._one_of_a_kind = {kind: threading.Lock() for kind in LAUNCHERS}
        self._thread = threading.Thread(target=self._work, name="paceline-chaos", daemon=True)

    def __enter__(self) -> Self:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Put back what stands still, and end."""
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        begun: list[threading.Thread] = []
        while self._waiting and not self._ended.wait(_LOOK_S):
            for fault in [one for one in self._waiting if self._marks.has(one.number)]:
                self._waiting.remove(fault)
                begun.append(
                    threading.Thread(
                        target=self._set_off,
                        args=(fault,),
                        name=f"paceline-chaos-{fault.number}",
                        daemon=True,
                    )
                )
                begun[-1].start()
        for thread in begun:
            thread.join()

    def _set_off(self, fault: Fault) -> None:
        same = self._one_of_a_kind[fault.kind]
        if fault.kind == PIPE and same.locked():
            # The worker would wait for longer than --hang-timeout, and be replaced for that.
            self._marks.claim_part(fault.number, DONE)
        with same, ExitStack() as afterwards:
            if self._ended.is_set():
                return
            if fault.kind == END:
                os.kill(os.getpid(), signal.SIGTERM)
            elif fault.kind == PIPE:
                for descriptor in (1, 2):
                    afterwards.enter_context(_unread(descriptor))
            elif fault.kind == FREEZE:
                for pid in self._workers(self._marks.read()[fault.number].pid):
                    afterwards.enter_context(_stopped(pid))
            self._marks.claim_part(fault.number, DONE)
            self._ended.wait(fault.seconds)

    def _workers(self, first: int) -> set[int]:
        """Return the process ids of all workers: those in the run's own list that have the parent of the one that is known."""
        try:
            known = {int(row["pid"]) for row in json.loads((self._run / WORKERS).read_text())}
        except (OSError, ValueError):
            known = set()
        parent = _parent(first)
        return {pid for pid in known | {first} if parent is not None and _parent(pid) == parent}


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """Stop a process, and have it go on; one that has ended by then stays so, whoever has its number now."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        yield
        return
    try:
        _send(process, signal.SIGSTOP)
        yield
    finally:
        _send(process, signal.SIGCONT)
        os.close(process)


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)


@contextmanager
def _unread(descriptor: int) -> Iterator[None]:
    """Put a full pipe in the place of where this process writes to, and write afterwards what came in the meantime."""
    real = os.dup(descriptor)
    reader, writer = os.pipe()
    filled = _fill(writer)
    os.dup2(writer, descriptor)
    os.close(writer)
    try:
        yield
    finally:
        os.dup2(real, descriptor)
        came = b"".join(_drained(reader))[filled:]
        while came:
            came = came[os.write(real, came) :]
        os.close(reader)
        os.close(real)


def _fill(writer: int) -> int:
    """Write to a pipe until it takes no more, and return how much that was."""
    os.set_blocking(writer, False)
    filled = 0
    with suppress(BlockingIOError):
        while True:
            filled += os.write(writer, bytes(1 << 16))
    os.set_blocking(writer, True)
    return filled


def _drained(reader: int) -> Iterator[bytes]:
    """Return what is in a pipe, and what a thread brings that waits for room in it."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    while poll.poll(_DRAIN_S * 1000):
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            return
        yield chunk

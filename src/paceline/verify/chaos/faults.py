"""Faults set off on purpose: what each does, where and when it is due, and the mark it leaves. Imports no torch.

A mark is made before its fault goes off and outlives the process that made it, so a fault goes off once, however
often its step is taken again.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.observe.formats import plural
from paceline.world.fault_points import CHECKPOINT, DATA, POINTS, STEP_POINTS

KILL, STOP, SLOW, LEAVE, JOIN, DISK = "kill", "stop", "slow", "leave", "join", "disk"
LATE, FREEZE, PIPE, END = "late", "freeze", "pipe", "end"
KINDS = {
    KILL: "SIGKILL",
    STOP: "SIGSTOP: the worker hangs until it is replaced",
    SLOW: "some tenths of a second without progress",
    LEAVE: "SIGTERM: the worker is given notice",
    JOIN: "another number of workers, and back",
    DISK: "a checkpoint is written to a full disk",
    LATE: "SIGKILL, and the replacement stands still at its start for longer than --hang-timeout",
    FREEZE: "every worker stands still for longer than --hang-timeout, then goes on",
    PIPE: "nobody reads what the launcher prints, for longer than --hang-timeout",
    END: "SIGTERM to the launcher, and the run is resumed",
}
LAUNCHERS = (FREEZE, PIPE, END)
"""These are done by the launcher's process, not by the worker that comes to their point."""
BREAKING = (KILL, STOP, LEAVE, JOIN)
"""After these a new group forms."""
_ONLY_AT = {JOIN: (DATA,), DISK: (CHECKPOINT,), **dict.fromkeys((LATE, *LAUNCHERS), STEP_POINTS)}
_AWAITED_S = 10.0
_LOOK_S = 0.02


def points_of(kind: str) -> tuple[str, ...]:
    """Return the points at which a kind of fault can go off."""
    return _ONLY_AT.get(kind, POINTS)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: due when its rank first comes to its point in its step or a later one."""

    number: int
    kind: str
    point: str
    step: int
    """Finished steps of the run."""
    rank: int = 0
    """Modulo the number of workers at that time. Only rank 0 writes checkpoints; in a regroup whoever is first."""
    seconds: float = 0.0
    """How long something stands still."""
    workers: int = 0
    """How many workers a join asks for."""
    after: int | None = None
    """For one in the regroup: the fault that brings the regroup about."""

    def __str__(self) -> str:
        what = {
            SLOW: f"slow by {self.seconds:.1f} s",
            JOIN: f"join: {plural(self.workers, 'worker')}",
            **{kind: f"{kind}, {self.seconds:.1f} s" for kind in (LATE, FREEZE, PIPE)},
        }
        return f"{what.get(self.kind, self.kind)}, {self.point}, step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where and when a fault went off."""

    number: int
    step: int
    rank: int
    pid: int
    time: float


class Marks:
    """The marks of all faults that went off, one file each in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def claim(self, fault: Fault, step: int, rank: int) -> bool:
        """Leave the mark of a fault that is about to go off; False where another worker has."""
        mark = Mark(number=fault.number, step=step, rank=rank, pid=os.getpid(), time=time.time())
        partial = self.folder / f".{fault.number}-{threading.get_native_id()}"
        partial.write_text(json.dumps(asdict(mark)))
        try:
            # Whole or not at all, and by one worker only: whoever reads it may come at any moment.
            os.link(partial, self._path(fault.number))
        except FileExistsError:
            return False
        finally:
            partial.unlink()
        return True

    def claim_part(self, number: int, part: str) -> bool:
        """Leave the mark of a further part of a fault that has gone off; False where it was left before."""
        try:
            (self.folder / f"{number}.{part}").open("x").close()
        except FileExistsError:
            return False
        return True

    def await_part(self, number: int, part: str) -> None:
        """Wait until another process has left that mark; not for ever, should that process have gone."""
        until = time.monotonic() + _AWAITED_S
        while not (self.folder / f"{number}.{part}").exists() and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def has(self, number: int) -> bool:
        """Return whether a fault has gone off."""
        return self._path(number).exists()

    def read(self) -> dict[int, Mark]:
        """Return all marks by the number of their fault."""
        found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in self.folder.glob("*.json")]
        return {mark["number"]: Mark(**mark) for mark in sorted(found, key=lambda each: float(each["time"]))}

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.json"

"""Which ranks have ended, so that nobody waits for them: by their own word, their launcher's, and this machine's processes.

A process that ends without a word is known by the number that it left in its first call; one that made none, under torchrun,
by the processes that the agent still has.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.world import env
from paceline.world.env import Identity

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

KEY = "presence/ended"
"""Where the store says who has ended: the first alone, for a call needs them all."""
_LOOK_S = 0.5
ABSENT_S = 10.0
"""A rank that torchrun has had no process of for so long has ended, and is not yet to be started."""
_WATCHERS = 2
"""So many ranks of a machine look at its processes, for one of them may be who has ended; they tell the others."""


def word(rank: int, host: str) -> str:
    """Return what is left at the key."""
    return json.dumps([rank, host])


def register(store: Store, rank: int) -> None:
    """Leave in the store by what this process is known."""
    with suppress(OSError):
        store.set(_place(rank), json.dumps([_machine(), os.getpid(), _begun(os.getpid())]))


class Lookout:
    """Sees who has ended, for one rank that waits."""

    def __init__(self, store: Store, identity: Identity) -> None:
        self._store, self._identity = store, identity
        first = identity.rank - identity.local_rank
        watched = identity.local_size if identity.local_rank < _WATCHERS else 0
        self._near = range(first, min(first + watched, identity.size))
        begun = time.monotonic()
        self._seen = dict.fromkeys(self._near, begun)
        self._look_at = begun + _LOOK_S

    def find(self) -> tuple[int, str] | None:
        """Return the rank and the machine of one that has ended, where one is known to have."""
        if self._store.check([KEY]):
            rank, host = json.loads(self._store.get(KEY))
            return int(rank), str(host)
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            with suppress(OSError, ValueError):  # what cannot be read says nothing
                return self._look(now)
        return None

    def _look(self, now: float) -> tuple[int, str] | None:
        beside = _beside(self._identity.rank) if env.has_agent_store() else None
        for rank in self._near:
            if beside is None or rank in beside:
                self._seen[rank] = now
            if self._has_gone(rank) or now - self._seen[rank] > ABSENT_S:
                return rank, env.host()
        return None

    def _has_gone(self, rank: int) -> bool:
        if not self._store.check([_place(rank)]):
            return False
        machine, number, begun = json.loads(self._store.get(_place(rank)))
        # Where this very process is not there to be seen, none is.
        known = bool(begun) and all(machine) and machine == _machine() and _begun(os.getpid()) != ""
        return known and _begun(number) != begun


def _place(rank: int) -> str:
    return f"presence/process/{rank}"


def _machine() -> list[str]:
    """Return what processes have in common that know each other by number."""
    return [env.host(), env.kernel(), env.namespace("pid")]


def _begun(process: int) -> str:
    """Return when a process was started, which tells it from another of its number; empty for one that has ended."""
    try:
        state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in "ZX" else rest[18]


def _beside(rank: int) -> set[int] | None:
    """Return the ranks that the parent of this process has as its children; None where not all of them are known for ranks."""
    found: dict[int, int | None] = {}
    for children in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread or a child that has just ended
            found |= {int(child): _rank_of(child) for child in children.read_text().split()}
    known = {one for one in found.values() if one is not None}
    return known if len(known) == len(found) and found.get(os.getpid()) == rank else None


def _rank_of(process: str) -> int | None:
    """Return the rank that a process was started with, where it has not written its title over that."""
    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next((int(one[5:]) for one in variables if one.startswith(b"RANK=")), None)

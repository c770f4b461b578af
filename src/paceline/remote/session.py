"""One worker's connection with the others: who they are, the proof that they belong to the run, and who is lost."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.errors import InputError, PacelineError
from paceline.remote.exchange import MessageExchange, Serve
from paceline.remote.failures import gone
from paceline.remote.gradients import Passes
from paceline.remote.names import Roles
from paceline.transport.mailbox import FORKED, PeerAddress

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_current: Session | None = None


class Session:
    """This worker among the others, from `start` to `close`."""

    def __init__(self, store: Store, roles: Roles, exchange: MessageExchange, timeout_s: float) -> None:
        self.exchange = exchange
        """What sends and gets this worker's messages."""
        self.rank, self.roles, self.timeout_s = exchange.rank, roles, timeout_s
        self.name = exchange.name
        """This worker's own name: `server:0`."""
        self.role = roles.role(self.rank)
        self.numbers, self.objects = exchange.numbers, exchange.objects
        self.passes = Passes(exchange)
        self.process = os.getpid()
        """The process that is in it; those that are forked from it are not."""
        self._store = store
        self._lost: dict[str, float] = {}
        self._lock = threading.Lock()
        self._open = True
        self.keeps: list[object] = []
        """What is to live as long as the session."""
        self.find_ended: Callable[[], tuple[int, str] | None] = lambda: None
        """Return the rank of a process that has ended without a word, and its machine."""
        self._on_close: list[Callable[[], None]] = []
        self._on_loss: list[Callable[[str], None]] = []

    def start(self, peers: dict[str, PeerAddress], serve: Serve) -> None:
        """Be the session of this worker's calls, and have those of the others taken."""
        global _current  # noqa: PLW0603  (a call names no session, so a worker is in one at a time)
        _current = self  # calls may come in before the next line returns
        self.exchange.start(peers, serve, self.note_lost)

    def workers(self, role: str) -> tuple[str, ...]:
        """Name the workers of a role that are there: the lost ones are left out."""
        return tuple(name for name in self.roles.workers(role) if name not in self._lost)

    @property
    def is_open(self) -> bool:
        """Whether this worker is still in it."""
        return self._open

    @property
    def lost(self) -> frozenset[str]:
        """The workers that are gone."""
        return frozenset(self._lost)

    def note_lost(self, worker: str) -> None:
        """Know that a worker is gone: every call to it fails at once from now on, and what it held is freed."""
        with self._lock:
            if worker in self._lost or not self._open:
                return
            self._lost[worker] = time.monotonic()
        self.exchange.lose(worker)
        self.passes.end_of(worker)
        freed = self.objects.release_worker(worker)
        self.exchange.pool.submit(freed.clear)
        for action in self._on_loss:
            action(worker)

    def check(self, worker: str, what: str) -> None:
        """Refuse to call a worker that is gone."""
        if worker in self._lost:
            raise gone(worker, what)

    def at_close(self, action: Callable[[], None]) -> None:
        """Have something done before the connections go."""
        self._on_close.append(action)

    def at_loss(self, action: Callable[[str], None]) -> None:
        """Have something done about each worker that is lost."""
        self._on_loss.append(action)

    def wait_for_others(self, patience_s: float = math.inf) -> None:
        """Serve calls until every other worker has come to its end or is lost, or patience is."""
        self._store.set(f"closed/{self.rank}", "")
        others = [rank for rank in range(self.roles.size) if rank != self.rank]
        limit = time.monotonic() + patience_s
        pause = _PAUSE_S
        while others and self._open and time.monotonic() < limit:
            # One question for all: a worker that only serves asks from its first moment to the end of the run.
            if self._store.check([f"closed/{rank}" for rank in others]):
                return
            ended = self.find_ended()
            if ended is not None and ended[0] in others:
                self.note_lost(self.roles.names[ended[0]])
            time.sleep(pause)
            pause = min(1.2 * pause, _LONGEST_PAUSE_S)
            others = [rank for rank in others if self.roles.names[rank] not in self._lost]

    def close(self) -> None:
        """Wait for the others, and part from them; one that is lost is not waited for."""
        if not self._open:
            return
        self.wait_for_others()
        self.abandon()

    def abandon(self) -> None:
        """Part at once: the group is broken, or all have come to their end."""
        global _current  # noqa: PLW0603
        with self._lock:
            if not self._open:
                return
            self._open = False
        for action in self._on_close:
            action()
        self.exchange.close()
        self.objects.clear()
        _current = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception nobody is waited for, and no other waits for this worker."""
        if kind is None:
            self.close()
            return
        with suppress(RuntimeError, PacelineError):  # the store is gone with whoever keeps it
            self._store.set(f"closed/{self.rank}", "")
        self.abandon()


def refuse_second() -> None:
    """Refuse to open a session where this worker is in one."""
    if _current is not None:
        raise InputError("this worker is in a session already. Close it first.")


def current() -> Session:
    """Return the session that this worker is in."""
    if _current is None:
        raise InputError(
            "this worker is in no session, so there is nobody to call. Start it with --roles or paceline.launch_roles."
        )
    if _current.process != os.getpid():
        raise PacelineError(FORKED)
    return _current

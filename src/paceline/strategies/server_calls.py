"""Both ends of the calls between trainers and servers. Every wait ends when the group breaks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, ParamSpec, TypeVar

from paceline import remote
from paceline.errors import RemoteError
from paceline.remote.grouping import PATIENCE_S, open_group
from paceline.world import World, spans
from paceline.world.interruption import InterruptedWaitError, Interruption
from paceline.world.status_page import Phase

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")
ANSWER_S = 20.0
"""How long an answer may take to come when the group has broken: a server whose machine is gone gives none."""
GOODBYE_S = 1.0
"""How long a server may take to hear that a trainer leaves."""


class ServerCalls:
    """A trainer's end: calls to all servers, and waits for their answers, which end when the group breaks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._bell = threading.Condition()
        world.interruption.on_raise(self._ring)
        self._session: remote.Session | None = open_group(world)
        self._names = self._session.workers("servers")
        self._leave = self.to_each(leave, GOODBYE_S)

    def to_each(
        self, function: Callable[Parameters, Value], timeout_s: float = PATIENCE_S
    ) -> list[remote.Method[Parameters, Value]]:
        """Return the function as it is on each server."""
        return [remote.call(name, function).options(timeout=timeout_s) for name in self._names]

    def wait(self, futures: Sequence[remote.Future[Value | None]]) -> list[Value]:
        """Return what each server answered, in the order of the calls."""
        return self._answers(futures, 0.0)

    def outcomes(self, futures: Sequence[remote.Future[Value | None]]) -> list[Value]:
        """Return the answers even if the group breaks meanwhile; raise what has happened to one that does not come."""
        return self._answers(futures, ANSWER_S)

    def _answers(self, futures: Sequence[remote.Future[Value | None]], grace_s: float) -> list[Value]:
        """Wait for all answers; after the group has broken, only until a time limit."""
        interruption = self._world.interruption
        before = self._world.status_page.enter(Phase.COMMUNICATION)
        for future in futures:
            future.when_done(self._ring)
        until: float | None = None
        with spans.of[spans.WAITING], self._bell:
            while not all(future.done() for future in futures):
                if not interruption.raised:
                    interruption.await_change(self._bell)
                    continue
                until = until or time.monotonic() + grace_s
                if time.monotonic() >= until:
                    interruption.check()
                self._bell.wait(until - time.monotonic())
        try:
            answers = remote.wait_all(futures)
        except RemoteError as error:
            raise InterruptedWaitError(str(error)) from error
        found = [one for one in answers if one is not None]
        if len(found) < len(answers):
            raise InterruptedWaitError("the group is broken: a server has left it")
        self._world.status_page.enter(before)
        return found

    def _ring(self) -> None:
        with self._bell:
            self._bell.notify_all()

    def close(self) -> None:
        """Release the servers, some of which may still wait for this trainer."""
        session, self._session = self._session, None
        if session is None:
            return
        for one in self._leave:
            with contextlib.suppress(RemoteError, RuntimeError):  # it may be what was lost
                one()
        session.abandon()


class Service:
    """A server's end: calls wait on threads of their own for the server's; without an answer (None) when the group breaks."""

    current: ClassVar[Service | None] = None
    """The one that calls come to: one per process, as the session."""

    def __init__(self, interruption: Interruption) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._interruption = interruption
        self._session: remote.Session | None = None
        interruption.on_raise(self.close)

    def serve(self, world: World) -> None:
        """Open the session; calls arrive from now on."""
        Service.current = type(self).current = self
        self._session = open_group(world)
        self._session.at_close(self.close)

    def close(self) -> None:
        """End every call that waits: the group is broken."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def abandon(self) -> None:
        """Release the group, and trainers that wait here."""
        self.close()
        session, self._session = self._session, None
        if session is not None:
            session.abandon()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait on the server's own thread, which holds `_changed`."""
        while self._open and not ready():
            self._interruption.await_change(self._changed)
        if not ready():
            raise InterruptedWaitError("the group is broken: a trainer was lost, or has left")


@remote.function
def leave() -> None:
    """Notify a server that a trainer leaves the group, which is broken by that."""
    if Service.current is not None:
        Service.current.close()

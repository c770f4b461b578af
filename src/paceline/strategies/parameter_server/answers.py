"""How a trainer waits for its servers: until all have answered, or the group is broken."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeVar

from paceline.errors import RemoteError
from paceline.remote import Future, wait_all
from paceline.world import World
from paceline.world.interruption import InterruptedWaitError
from paceline.world.status_page import Phase

Value = TypeVar("Value")


class Answers:
    """Waits that end when the group does: torch's own would go on until their time-out."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._bell = threading.Condition()
        world.interruption.on_raise(self._ring)

    def wait(self, futures: Sequence[Future[Value | None]]) -> list[Value]:
        """Return what each server answered, in the order of the calls."""
        before = self._world.pulse.enter(Phase.COMMUNICATION)
        for future in futures:
            future.when_done(self._ring)
        with self._bell:
            while not all(future.done() for future in futures):
                self._world.interruption.check()
                self._world.interruption.await_change(self._bell)
        found = self.outcomes(futures)
        self._world.pulse.enter(before)
        return found

    def outcomes(self, futures: Sequence[Future[Value | None]]) -> list[Value]:
        """Return the answers even if the group breaks meanwhile; none is raised as what has happened to it."""
        before = self._world.pulse.enter(Phase.COMMUNICATION)
        try:
            answers = wait_all(futures)
        except RemoteError as error:
            raise InterruptedWaitError(str(error)) from error
        found = [one for one in answers if one is not None]
        if len(found) < len(answers):
            raise InterruptedWaitError("the group is broken: a server has left it")
        self._world.pulse.enter(before)
        return found

    def _ring(self) -> None:
        with self._bell:
            self._bell.notify_all()

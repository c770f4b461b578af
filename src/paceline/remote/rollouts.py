"""Numbered pieces of work dealt to the workers of a role: what a lost worker had in hand, the others do again.

A piece is a function of its number alone, so the results do not depend on how many workers there are, nor on who is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from paceline.errors import WorkerGoneError
from paceline.remote.calls import Future, method
from paceline.remote.proxy import create
from paceline.remote.session import current

Result = TypeVar("Result")
TIMEOUT_S = 600.0
"""For one share of a round; a lost worker is noticed long before."""


class Player(Protocol[Result]):
    """A service that does pieces of work by their numbers."""

    def play(self, numbers: list[int]) -> list[Result]:
        """Return one result for each number, in their order."""


class Rollouts(Generic[Result]):
    """A service of one kind on every worker of a role, and the pieces of work dealt to them."""

    def __init__(self, role: str, made_by: Callable[..., Player[Result]], *args: Any) -> None:
        self._role = role
        self._players: dict[str, Player[Result]] = {}
        for worker in current().workers(role):
            with _unless_lost(worker):
                self._players[worker] = create(worker, made_by, *args)

    def gather(self, numbers: Iterable[int]) -> list[Result]:
        """Have all pieces done, and give the results in the order of their numbers."""
        order = list(numbers)
        done: dict[int, Result] = {}
        while left := [number for number in order if number not in done]:
            done |= self._round(left)
        return [done[number] for number in order]

    def _round(self, numbers: list[int]) -> dict[int, Result]:
        """Deal the numbers to the workers that are there, and give what came back."""
        players = self._present()
        in_progress: list[tuple[str, list[int], Future[list[Result]]]] = []
        done: dict[int, Result] = {}
        for place, (name, player) in enumerate(players.items()):
            if share := numbers[place :: len(players)]:
                with _unless_lost(name):
                    play = method(player.play).options(timeout=TIMEOUT_S)
                    in_progress.append((name, share, play.future(share)))
        for name, share, answer in in_progress:
            with _unless_lost(name):
                done |= zip(share, answer.wait(), strict=True)
        return done

    def _present(self) -> dict[str, Player[Result]]:
        lost = current().lost
        self._players = {name: player for name, player in self._players.items() if name not in lost}
        if not self._players:
            raise WorkerGoneError(
                f"all workers of the role {self._role} are gone, so nobody is left to do their work. "
                "Look into their logs for the cause, and start the run again."
            )
        return self._players


@contextmanager
def _unless_lost(worker: str) -> Iterator[None]:
    """Pass over the loss of this worker; that of another one, which it had called, is an error."""
    try:
        yield
    except WorkerGoneError:
        if worker not in current().lost:
            raise

"""Where each worker left a call of `run.steps`: one that leaves at another step than the others would part from them."""

from __future__ import annotations

from contextlib import suppress
from weakref import WeakKeyDictionary

from torch.distributed import DistError

from paceline.errors import InputError
from paceline.world import World
from paceline.world.base import Comm
from paceline.world.words import hear, tell

_ADVICE = (
    "All workers must leave it at the same step: decide by what is the same on all of them (step.result.loss, run.evaluate), "
    "not by a number of one worker's own."
)


_runs: WeakKeyDictionary[Comm, int] = WeakKeyDictionary()
"""How many runs have spoken in each group: several may follow each other in one launch, and share its store."""


class Leaving:
    """One worker's word on where it left, and its wait for that of the others.

    Others may be in their next step still and wait for this worker there, so no collective may be used: each writes where
    it left to the store in which the workers met. Steps cost nothing for it.
    """

    def __init__(self) -> None:
        self._left: tuple[int, int] | None = None
        self._places: WeakKeyDictionary[Comm, int] = WeakKeyDictionary()

    @property
    def pending(self) -> bool:
        """Whether this worker has left a call and has yet to hear where the others did."""
        return self._left is not None

    def note(self, world: World, phase: int, number: int) -> None:
        """Say that this worker has left a call of `run.steps`, and behind how many steps."""
        self._left = phase, number
        with suppress(DistError):
            self._tell(world, phase, number)

    def check(self, world: World) -> None:
        """Wait until all have left the same call behind the same step, or raise."""
        if self._left is None:
            return
        phase, number = self._left
        try:
            self._tell(world, phase, number)  # another group may have formed since
            _check_all(world, self._key(world, phase), number)
        except DistError:
            world.interruption.check()  # else the store is gone: those who train together can do without it
        self._left = None

    def _tell(self, world: World, phase: int, number: int) -> None:
        tell(world, self._key(world, phase), str(number))

    def _key(self, world: World, phase: int) -> str:
        if world.comm not in self._places:
            self._places[world.comm] = _runs[world.comm] = _runs.get(world.comm, 0) + 1
        return f"left/{self._places[world.comm]}/{phase}"


def _check_all(world: World, said: str, number: int) -> None:
    mine = f"rank {world.rank} left the loop of run.steps behind step {number - 1}"

    def late(rank: int, waited_s: float) -> InputError:
        return InputError(f"{mine}, and rank {rank} is still in it {waited_s:g} s later. {_ADVICE}")

    for rank, word in hear(world, said, late):
        if int(word) != number:
            raise InputError(f"{mine}, but rank {rank} behind step {int(word) - 1}. {_ADVICE}")

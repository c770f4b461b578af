"""Where each worker left a call of `run.steps`: one that leaves at another step than the others would part from them."""

from __future__ import annotations

import time
from contextlib import suppress
from weakref import WeakKeyDictionary

from torch.distributed import DistError

from paceline.errors import InputError
from paceline.world import World
from paceline.world.base import Comm
from paceline.world.pulse import Phase

WAIT = 0.8
"""How long the others are waited for, in parts of --hang-timeout: whoever left knows more than a verdict on a hang could say."""
_POLL_S = 0.002
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

    def check(self, world: World, limit_s: float) -> None:
        """Wait until all have left the same call behind the same step, or raise."""
        if self._left is None:
            return
        phase, number = self._left
        try:
            self._tell(world, phase, number)  # another group may have formed since
            _await_all(world, self._key(world, phase), number, limit_s)
        except DistError:
            world.interruption.check()  # else the store is gone: those who train together can do without it
        self._left = None

    def _tell(self, world: World, phase: int, number: int) -> None:
        if world.size > 1 and world.store is not None:
            world.store.set(f"{self._key(world, phase)}/{world.rank}", str(number))

    def _key(self, world: World, phase: int) -> str:
        if world.comm not in self._places:
            self._places[world.comm] = _runs[world.comm] = _runs.get(world.comm, 0) + 1
        return f"left/{self._places[world.comm]}/{phase}"


def _await_all(world: World, said: str, number: int, limit_s: float) -> None:
    if world.size == 1 or world.store is None:
        return
    before = world.pulse.enter(Phase.COMMUNICATION)
    limit = time.monotonic() + limit_s
    mine = f"rank {world.rank} left the loop of run.steps behind step {number - 1}"
    for rank in range(world.size):
        key = f"{said}/{rank}"
        while not world.store.check([key]):
            world.interruption.check()
            if time.monotonic() > limit:
                raise InputError(f"{mine}, and rank {rank} is still in it {limit_s:g} s later. {_ADVICE}")
            time.sleep(_POLL_S)
        theirs = int(world.store.get(key))
        if theirs != number:
            raise InputError(f"{mine}, but rank {rank} behind step {theirs - 1}. {_ADVICE}")
    world.pulse.enter(before)

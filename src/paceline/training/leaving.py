"""Where each worker left a call of `run.steps`: one that leaves at another step than the others would part from them."""

from __future__ import annotations

from contextlib import suppress
from weakref import WeakKeyDictionary

from torch.distributed import DistError

from paceline.errors import InputError
from paceline.world import World
from paceline.world.base import Comm
from paceline.world.words import forget, hear, heard, tell

_END, _BREAK, _FOR_GOOD = "end", "break", "for-good"
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
        self._left: tuple[int, int, str] | None = None
        self._unfinished = False
        self._told: tuple[Comm, str] | None = None
        """Under what the others have last heard of this worker, and in which group."""
        self._places: WeakKeyDictionary[Comm, int] = WeakKeyDictionary()

    @property
    def pending(self) -> bool:
        """Whether this worker has left a call and has yet to hear where the others did."""
        return self._left is not None

    def note(self, world: World, phase: int, number: int, *, ended: bool, unfinished: bool = False) -> None:
        """Note that this worker has left a call of `run.steps`, behind how many steps, and whether at its end.

        Or, where it left an `unfinished` step, that the step which the workers were to take once more was never taken. The
        others hear of a `break` when this worker next does something with them: an exception leaves the loop in the same way.
        """
        self._left = phase, number, f"{number} {_END if ended else _BREAK}"
        self._unfinished = unfinished
        if ended:
            with suppress(DistError):
                tell(world, self._key(world, phase), self._left[-1])

    def check(self, world: World) -> None:
        """Wait until all have left the same call behind the same step, or raise."""
        if self._left is None:
            return
        phase, number, word = self._left
        if self._unfinished:
            raise InputError(
                f"the loop was left at step {number}, in which a worker was lost: it was to be taken once more, and was not. "
                "Leave the loop behind a step that was finished: `if not step.again and ...: break`. --resume goes on from the "
                "last checkpoint."
            )
        try:
            key = self._key(world, phase)
            tell(world, key, word)  # another group may have formed since
            tell(world, f"{key}/{_FOR_GOOD}", word)
            _check_all(world, key, number, word)
            if (
                self._told is not None and self._told[0] is world.comm
            ):  # all have left this call, so all have heard of that
                forget(world, self._told[1])
                forget(world, f"{self._told[1]}/{_FOR_GOOD}")
            self._told = world.comm, key
        except DistError:
            world.interruption.check()  # else the store is gone: those who train together can do without it
        self._left = None

    def check_present(self, world: World, phase: int, number: int) -> None:
        """Raise where another worker waits for this one outside of the loop, while this one waits for it in a step."""
        with suppress(DistError):
            for rank, word in heard(world, f"{self._key(world, phase)}/{_FOR_GOOD}"):
                theirs = int(word.split()[0])
                if theirs <= number:
                    raise InputError(
                        f"rank {rank} left the loop of run.steps {_where(theirs)}, and rank {world.rank} waits for it in "
                        f"step {number}. All workers must leave it at the same step: where the loop catches an error, raise it "
                        "again; for `break`, decide by what is the same on all of them (step.result.loss, run.evaluate)."
                    )

    def _key(self, world: World, phase: int) -> str:
        if world.comm not in self._places:
            self._places[world.comm] = _runs[world.comm] = _runs.get(world.comm, 0) + 1
        return f"left/{self._places[world.comm]}/{phase}"


def _check_all(world: World, said: str, number: int, mine: str) -> None:
    here = f"rank {world.rank} left the loop of run.steps {_where(number)}"

    def late(rank: int, waited_s: float) -> InputError:
        return InputError(f"{here}, and rank {rank} is still in it {waited_s:g} s later. {_ADVICE}")

    for rank, word in hear(world, said, late):
        theirs, how = word.split()
        if int(theirs) != number:
            raise InputError(f"{here}, but rank {rank} {_where(int(theirs))}. {_ADVICE}")
        if word != mine:
            with_break, at_end = (rank, world.rank) if how == _BREAK else (world.rank, rank)
            raise InputError(
                f"rank {with_break} left the loop of run.steps with break behind its last step, where rank {at_end} came to the "
                "end of it: what is done at the end, some would do and others not. Leave it alike on all workers."
            )


def _where(number: int) -> str:
    return f"behind step {number - 1}" if number else "before its first step was taken"

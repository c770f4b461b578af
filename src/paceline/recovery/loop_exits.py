"""Where each worker left a call of `run.steps`: one that leaves at another step than the others would part from them."""

from __future__ import annotations

from collections.abc import Sequence
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
_CAUGHT = (
    "All workers must leave it at the same step: where the loop catches an error, raise it again; for `break` and `return`, "
    "decide by what is the same on all of them (step.result.loss, run.evaluate)."
)
_ENDED = (
    "Its data or steps ended there: give the same epochs and steps on all workers, and of a stream the whole on every worker, "
    "not a part by its rank: paceline deals it out."
)


_runs: WeakKeyDictionary[Comm, int] = WeakKeyDictionary()
"""How many runs have spoken in each group: several may follow each other in one launch, and share its store."""


class LoopExits:
    """One worker's word on where it left, and its wait for that of the others.

    Others may be in their next step still and wait for this worker there, so no collective may be used: each writes where
    it left to the store in which the workers met. Steps cost nothing for it.

    A word is heard in the group it was said in: each worker says its last one again in every group it enters, for one that was
    kept from hearing it in the group before, whether or not it waits for anybody itself.
    """

    def __init__(self) -> None:
        self._left: tuple[int, int, str] | None = None
        """The call that this worker left last, the steps taken by then, and its word on that."""
        self._waits = False
        """Whether it has yet to hear where the others left that call."""
        self._unfinished = False
        self._told: tuple[Comm, str] | None = None
        """Under what the others have last heard of this worker, and in which group."""
        self._places: WeakKeyDictionary[Comm, int] = WeakKeyDictionary()

    @property
    def pending(self) -> bool:
        """Whether this worker has left a call and has yet to hear where the others did."""
        return self._waits

    def begin(self) -> None:
        """Know that the next call has begun: whoever began it had heard that all left the one before alike."""
        self._waits = False

    def go_back(self, phase: int) -> None:
        """Know that the run stands in a call again that this worker may have left."""
        if self._left is not None and self._left[0] >= phase:
            self._left, self._waits = None, False

    def enter_group(self, world: World) -> None:
        """Repeat the last word to the workers of a group that has formed."""
        with suppress(DistError):
            self._claim(world)
            if self._left is not None and not (self._waits and self._unfinished):
                phase, _, word = self._left
                self._forget_before(world, key := self._key(world, phase))
                tell(world, key, word)

    def note(self, world: World, phase: int, number: int, *, ended: bool, unfinished: bool = False) -> None:
        """Note that this worker has left a call of `run.steps`, after how many steps, and whether at its end.

        Or, where it left an `unfinished` step, that the step which the workers were to take once more was never taken. The
        others hear of a `break` when this worker next does something with them: an exception leaves the loop in the same way.
        """
        self._left = phase, number, f"{number} {_END if ended else _BREAK}"
        self._waits, self._unfinished = True, unfinished
        if ended:
            with suppress(DistError):
                tell(world, self._key(world, phase), self._left[-1])

    def check(self, world: World) -> None:
        """Wait until all have left the same call after the same step, or raise."""
        if self._left is None or not self._waits:
            return
        phase, number, word = self._left
        if self._unfinished:
            raise InputError(
                f"the loop was left at step {number}, in which a worker was lost: it was to be taken once more, and was not. "
                "Leave the loop after a step that was finished: `if not step.again and ...: break`. --resume goes on from the "
                "last checkpoint."
            )
        try:
            key = self._key(world, phase)
            tell(world, key, word)  # another group may have formed since
            tell(world, f"{key}/{_FOR_GOOD}", word)
            _check_all(world, key, number, word)
            self._forget_before(world, key)  # all have left this call, so all have heard of that
        except DistError:
            world.interruption.check()  # else the store is gone: those who train together can do without it
        self._waits = False

    def check_present(self, world: World, phase: int, number: int, ranks: Sequence[int] = ()) -> None:
        """Raise where another worker (of `ranks`, if given) has left the loop for good, and this one waits for it in a step."""
        if self._left is not None and self._left[0] >= phase:
            return  # this one has left it too
        with suppress(DistError):
            for rank, word in heard(world, f"{self._key(world, phase)}/{_FOR_GOOD}", ranks):
                theirs = int(word.split()[0])
                if theirs <= number:
                    raise InputError(
                        f"rank {rank} left the loop of run.steps {_where(theirs)}, and rank {world.rank} waits for it in "
                        f"step {number}. {_advice(word, _CAUGHT)}"
                    )

    def _forget_before(self, world: World, key: str) -> None:
        """Take back this worker's word on an earlier call, and remember the one that the group knows now."""
        if self._told is not None and self._told[0] is world.comm and self._told[1] != key:
            forget(world, self._told[1])
            forget(world, f"{self._told[1]}/{_FOR_GOOD}")
        self._told = world.comm, key

    def _claim(self, world: World) -> int:
        """Return which of the runs in a group this is; the same on all of its workers."""
        if world.comm not in self._places:
            self._places[world.comm] = _runs[world.comm] = _runs.get(world.comm, 0) + 1
        return self._places[world.comm]

    def _key(self, world: World, phase: int) -> str:
        return f"left/{self._claim(world)}/{phase}"


def _check_all(world: World, said: str, number: int, mine: str) -> None:
    here = f"rank {world.rank} left the loop of run.steps {_where(number)}"

    def late(rank: int, when: str) -> InputError:
        return InputError(f"{here}, and rank {rank} has not {when}. {_advice(mine)}")

    for rank, word in hear(world, said, late):
        theirs, how = word.split()
        if int(theirs) != number:
            first = mine if number < int(theirs) else word
            raise InputError(f"{here}, but rank {rank} {_where(int(theirs))}. {_advice(first)}")
        if word != mine:
            with_break, at_end = (rank, world.rank) if how == _BREAK else (world.rank, rank)
            raise InputError(
                f"rank {with_break} left the loop of run.steps with break after its last step, where rank {at_end} came to the "
                "end of it: what is done at the end would run on some workers only. Leave the loop alike on all workers."
            )


def _advice(word: str, otherwise: str = _ADVICE) -> str:
    """Return what to do about a worker that left before the others, by its word."""
    return _ENDED if word.endswith(_END) else otherwise


def _where(number: int) -> str:
    return f"after step {number - 1}" if number else "before its first step was taken"

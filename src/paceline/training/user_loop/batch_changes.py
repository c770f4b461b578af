"""Finds a loop that takes from an iterator, sets the optimizer or counts with each batch: a worker has as many as it has shards.

Workers that have as many agree on what comes of it, and nothing fails: it is that of no other number of workers. What is done
in one batch of several is left alone, and so is setting something to one thing in all of them. Where a worker has one batch
nobody can tell "with each" from "once a step", so that is told, and refused only of iterators.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer

from paceline.compat.data_loader import is_iterator, watch_iterators
from paceline.errors import InputError
from paceline.strategies.base import StepWork
from paceline.strategies.guards.option_texts import OptionTexts
from paceline.strategies.guards.reached import Named
from paceline.training.checks.hidden_state import HiddenState
from paceline.training.checks.iterator_places import NEW, RECEIVES, place_of
from paceline.training.user_loop.loop_state import LoopState
from paceline.training.user_loop.marks import slot_marks

_INSIDE = "inside `for batch in step`, and how many batches a worker has depends on shards and workers"
_ITERATORS, _OPTIMIZER = "iterators", "optimizer"
_INSTEAD = {
    _ITERATORS: "Take from it once a step, before `for batch in step`, or give one data set of pairs.",
    _OPTIMIZER: (
        "Change it once a step: scheduler.step(), and a rate that is set by hand, belong behind the batches, or before them."
    ),
}
_COUNT_ONCE = (
    "Change it once a step, behind the batches, by what all workers share (step.result.size, .weight, .loss)."
)
_Found = Iterator[tuple[str, str]]
"""What a batch has done, each with its kind: two batches are compared by kinds."""


class BatchChanges:
    """What the batches of one step have changed so far."""

    def __init__(
        self,
        work: StepWork,
        hidden: HiddenState,
        optimizer: Optimizer,
        options: OptionTexts,
        registered: LoopState | None,
    ) -> None:
        """`hidden` knows the iterators, and what is looked at in this step; where it is not sharded a worker has all batches.

        `options` are those of the step before: describing them all takes longer than looking for a change.
        """
        self._work, self._batches = work, 0
        self._done: dict[str, str] = {}
        self._iterators = _Iterators(hidden.iterators)
        self._looks: list[_States | _Settings | _Iterators] = []
        if hidden.sharded:
            # States first: a schedule that is stepped sets options, too.
            states = [_States(registered)] if hidden.looks and registered is not None else []
            self._looks = [*states, _Settings(optimizer, options, slots=hidden.watches), self._iterators]

    def watching(self) -> AbstractContextManager[None]:
        """Return a context in which iterators of DataLoaders are seen wherever they lie."""
        return self._iterators.watching() if self._looks else nullcontext()

    def begin_batch(self) -> None:
        """Note what there is, before the loop is given a batch."""
        self._iterators.begin()

    def end_batch(self) -> None:
        """Raise where a second batch of this step has changed something."""
        self._batches += 1
        done: dict[str, str] = {}
        for kind, does in (found for look in self._looks for found in look.changed()):
            done.setdefault(kind, does)
        self._refuse(done, [kind for kind in done if kind in self._done])
        self._done |= done

    def end(self) -> dict[str, str]:
        """Return what to tell of each kind, or raise, where this worker has one shard: others do the same with theirs."""
        if self._batches != 1 or len(self._work.shards) != 1:
            return {}
        self._refuse(self._done, [kind for kind in self._done if kind == _ITERATORS])
        return {
            f"{kind} in each batch": f"the loop {does} {_INSIDE}: where each of several does so, it is refused. {_instead(kind)}"
            for kind, does in self._done.items()
        }

    def _refuse(self, done: dict[str, str], kinds: list[str]) -> None:
        for kind in kinds:
            raise InputError(
                f"step {self._work.number}: the loop {done[kind]} with each batch, {_INSIDE}: none would get what one process "
                f"gets. {_instead(kind)}"
            )


def _instead(kind: str) -> str:
    return _INSTEAD.get(kind, _COUNT_ONCE)


class _States:
    """What was registered."""

    def __init__(self, registered: LoopState) -> None:
        self._registered, self._marks = registered, registered.marks()

    def changed(self) -> _Found:
        before, self._marks = self._marks, self._registered.marks()
        for (name, mark), one in zip(self._marks.items(), self._registered.objects(), strict=True):
            if mark != before.get(name, mark):
                if isinstance(getattr(one, "optimizer", None), Optimizer) and hasattr(one, "step"):
                    yield _OPTIMIZER, f"calls step() of the {type(one).__name__}"
                else:
                    yield f"state {name}", f"changes the state {name!r} of run.register"


class _Settings:
    """What the optimizer is set to."""

    def __init__(self, optimizer: Optimizer, options: OptionTexts, *, slots: bool) -> None:
        """`slots`: look at what the optimizer keeps of its parameters, too."""
        self._optimizer, self._options, self._keeps = optimizer, options, slots
        self._marks = self._look()

    def changed(self) -> _Found:
        before, self._marks = self._marks, self._look()
        if before != self._marks:
            what = "options (lr, ...)" if before[0] != self._marks[0] else "state"
            yield _OPTIMIZER, f"changes the optimizer's {what}"

    def _look(self) -> tuple[Any, Any]:
        return self._options.look(self._optimizer), slot_marks(self._optimizer) if self._keeps else None


class _Iterators:
    """Where iterators stand; one that is begun in the batch that it is advanced in is no harm."""

    def __init__(self, reached: Sequence[Named]) -> None:
        self._reached = reached
        self._names = {id(one): name for name, one in reached}
        self._thread = threading.get_ident()
        self._open = False
        self._places: list[object] = []
        self._begun: list[Any] = []
        self._advanced: list[Named] = []

    def watching(self) -> AbstractContextManager[None]:
        return watch_iterators(self._note_begun, self._note_advanced)

    def begin(self) -> None:
        self._places = [place_of(one) for _, one in self._reached]
        self._begun, self._advanced, self._open = [], [], True

    def changed(self) -> _Found:
        self._open = False
        for named, before in zip(self._reached, self._places, strict=True):
            # What the first item does with a generator may be all that ever changes.
            if not self._advanced and before != NEW and place_of(named[1]) not in (before, RECEIVES):
                self._advanced.append(named)
        for name, one in self._advanced[:1]:
            what = "an iterator of a DataLoader" if is_iterator(one) else "an iterator of its own"
            yield _ITERATORS, f"takes from {f'{name}, an iterator of its own,' if name else what}"

    def _note_begun(self, iterator: Any) -> None:
        if self._is_mine():
            self._begun.append(iterator)

    def _note_advanced(self, iterator: Any) -> None:
        if self._is_mine() and not any(one is iterator for one in self._begun):
            self._advanced.append((self._names.get(id(iterator), ""), iterator))

    def _is_mine(self) -> bool:
        return self._open and threading.get_ident() == self._thread

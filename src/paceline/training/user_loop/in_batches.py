"""Finds a loop that changes something of its own with each batch of a step: how many a worker has depends on the shards.

`scheduler.step()` inside `for batch in step` ticks as often as this worker has batches, and `seen["n"] += len(x)` on a registered
state counts those of one worker. Workers that have as many agree on it, so their weights are alike and a checkpoint holds it;
they are those of no other number of workers. `u, v = next(unlabelled)` takes as often as this worker has batches, and each worker
from a copy of its own: not what one process takes, and nothing fails. An iterator that is begun in the same batch is no harm,
and one that is advanced in a single batch of several is left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.compat.data_loader import is_iterator, watch_iterators
from paceline.errors import InputError
from paceline.strategies.guards.reached import Named
from paceline.training.checks.iterator_places import NEW, place_of
from paceline.training.user_loop.loop_state import LoopState
from paceline.training.user_loop.marks import Marks, slot_marks


class BatchSettings:
    """What the optimizer was set to before the batch at hand; setting it to one thing in all batches of a step is no harm."""

    def __init__(self, number: int, optimizer: Optimizer, *, looks: bool) -> None:
        """`looks`: look at what the optimizer keeps of its parameters, too."""
        self._number, self._optimizer, self._looks = number, optimizer, looks
        self._options, self._slots = self._marks()
        self._changed = False

    def check(self) -> None:
        """Raise where a second batch of this step has changed it; called behind each batch, some microseconds."""
        options, slots = self._marks()
        if options == self._options and slots == self._slots:
            return
        if self._changed:
            what = "options (lr, ...)" if options != self._options else "state"
            raise InputError(
                f"step {self._number}: the loop changes the optimizer's {what} with each batch, inside `for batch in step`, and "
                "how many batches a worker has depends on shards and workers. Change it once a step: scheduler.step(), and a "
                "rate that is set by hand, belong behind the batches, or before them."
            )
        self._options, self._slots, self._changed = options, slots, True

    def _marks(self) -> tuple[list[Any], Marks | None]:
        options = [
            (key, _mark(value))
            for group in self._optimizer.param_groups
            for key, value in group.items()
            if key != "params"
        ]
        return options, slot_marks(self._optimizer) if self._looks else None


def _mark(value: Any) -> Any:
    """Return what tells an option from another; one on a GPU is not looked at, which would wait for it."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    return tuple(value) if type(value) is list else value


class BatchStates:
    """What was registered, as it was before the batch at hand; setting it to one thing in all batches of a step is no harm."""

    def __init__(self, number: int, shards: int, registered: LoopState | None) -> None:
        """`shards` are this worker's; where nothing is to be looked at, `registered` is None."""
        self._number, self._shards, self._registered = number, shards, registered
        self._marks = self._look()
        self._changed: set[str] = set()

    def check(self) -> None:
        """Raise where a second batch of this step has changed a state."""
        before, self._marks = self._marks, self._look()
        changed = {name for name, mark in self._marks.items() if name in before and mark != before[name]}
        for name in sorted(changed & self._changed):
            raise InputError(f"step {self._number}: {_changing(name)}")
        self._changed |= changed

    def notes(self) -> list[str]:
        """Return what to tell where this worker had one batch: whether each would change it cannot be seen there."""
        return [_changing(name) for name in sorted(self._changed)] if self._shards == 1 else []

    def _look(self) -> dict[str, Any]:
        return {} if self._registered is None else self._registered.marks()


def _changing(name: str) -> str:
    return (
        f"the loop changes the state {name!r} of run.register inside `for batch in step`, and how many batches a worker has "
        "depends on shards and workers: none would save what one process does. Change it once a step, behind the batches, by "
        "what all workers share (step.result.size, .weight, .loss)."
    )


class BatchIterators:
    """Where iterators stood before the batch at hand, and in how many batches of this step one was advanced."""

    def __init__(self, number: int, shards: int, reached: Sequence[Named], *, sharded: bool) -> None:
        """`shards` are this worker's; `reached` are the iterators known by now; not `sharded`: a worker has all batches."""
        self._number, self._shards, self._sharded = number, shards, sharded
        self._reached = reached if sharded else ()
        self._names = {id(one): name for name, one in self._reached}
        self._thread = threading.get_ident()
        self._open = False
        self._places: list[object] = []
        self._begun: list[Any] = []
        self._advanced: Named | None = None
        self._batches = 0
        """How many have advanced one."""

    def watching(self) -> AbstractContextManager[None]:
        """Return a context in which iterators of DataLoaders are seen wherever they lie."""
        return watch_iterators(self._note_begun, self._note_advanced) if self._sharded else nullcontext()

    def begin_batch(self) -> None:
        """Note where iterators stand, before the loop is given a batch."""
        self._places = [place_of(one) for _, one in self._reached]
        self._begun, self._advanced, self._open = [], None, True

    def end_batch(self) -> None:
        """Raise where a second batch of this step has advanced one."""
        self._open = False
        if self._advanced is None:
            for (name, one), before in zip(self._reached, self._places, strict=True):
                # What the first item does with a generator may be all that ever changes.
                if before != NEW and place_of(one) != before:
                    self._advanced = name, one
                    break
        if self._advanced is not None:
            self._batches += 1
            if self._batches > 1:
                self._refuse(*self._advanced)

    def end(self) -> None:
        """Raise where the one batch of this worker's one shard has: others take the same for theirs."""
        if self._batches and self._shards == 1 and self._advanced is not None:
            self._refuse(*self._advanced)

    def _note_begun(self, iterator: Any) -> None:
        if self._open and threading.get_ident() == self._thread:
            self._begun.append(iterator)

    def _note_advanced(self, iterator: Any) -> None:
        mine = self._open and threading.get_ident() == self._thread and self._advanced is None
        if mine and not any(one is iterator for one in self._begun):
            self._advanced = self._names.get(id(iterator), ""), iterator

    def _refuse(self, name: str, one: Any) -> None:
        if name:
            what = f"{name}, an iterator of its own,"
        else:
            what = "an iterator of a DataLoader" if is_iterator(one) else "an iterator of its own"
        raise InputError(
            f"step {self._number}: the loop takes from {what} with each batch, inside `for batch in step`, and how many batches "
            "a worker has depends on shards and workers: none would get what one process gets. Take from it once a step, before "
            "`for batch in step`, or give one data set of pairs."
        )

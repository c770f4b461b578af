"""What passes compute with that is neither parameter nor buffer: generators, tensors, arrays, numbers carried from pass to pass.

Each worker's passes move its own, so what is drawn from them or read in them depends on which shards a worker has. Nothing
fails, no checkpoint holds them, and weights come out otherwise than with one process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import InputError
from paceline.strategies.base import LossFunction
from paceline.strategies.guards.generator_states import State, drew_on, kind_of, state_of
from paceline.strategies.guards.reached import LOOP, Generator, Named, Reached, loop_objects, reached_from
from paceline.task import Loss, Task
from paceline.training.checks.carried import Flow, can_follow, holder_of
from paceline.training.checks.counters import Numbers, changing
from paceline.training.checks.findings import others_too, writes_to
from paceline.training.checks.iterator_places import iterators_among

_LARGE = 1 << 22
"""Bytes of arrays that are compared by their values."""


class HiddenState:
    """Watches them while the passes of a step last, not while data is read, the optimizer updates or the loop works for itself.

    They are looked for in the steps 1, 2, 4, 8 and so on. Generators are watched in every step from there on. A tensor that
    passes have put somewhere is followed through the next step: only there is seen whether it is computed with.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._task: Task | None = None
        self._loop: FrameType | None = None
        self._thread = threading.get_ident()
        self._steps = 0
        self.looks = self.watches = False
        """Whether they are looked for in this step; whether there is anything to watch in it."""
        self._open = False
        self._generators: dict[str, Generator] = {}
        self._states: dict[str, State] = {}
        self._drawn: list[tuple[str, bool | None]] = []
        self._draws: dict[str, bool | None] = {}
        """What was found out about generators that have moved: looking for it once more takes milliseconds."""
        self._tensors: list[tuple[str, weakref.ref[Tensor], int]] = []
        self._arrays: dict[str, bytes] = {}
        self._held: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self._left: dict[str, weakref.ref[Tensor]] = {}
        """Tensors that the passes of the step before have put where they are."""
        self._flow: Flow | None = None
        self._written: list[str] = []
        self._carried: list[tuple[str, bool]] = []
        self._numbers, self.sharded = Numbers(), True
        """What knows their plain numbers; whether a step has several shards."""
        self.iterators: list[Named] = []
        """Those that are reached while the passes of this step last, where they are looked for."""
        self._changed: dict[str, tuple[object, object]] = {}
        self.remarks: dict[str, str] = {}
        """What else there is to tell of the passes of this step, once under each key."""
        self.told: set[str] = set()
        """What a note has named."""

    def enter(self, model: nn.Module, task: Task | None = None, *, sharded: bool = True) -> None:
        """Note that a step is about to begin; where it is not `sharded` a pass is a step, and numbers may count it."""
        if model is not self._model:
            self._model, self._steps, self._left, self._generators, self._tensors = model, 0, {}, {}, []
        self._task, self.sharded = task, sharded
        self._steps += 1
        self.looks = self._steps.bit_count() == 1
        self.watches = bool(self.looks or self._generators or self._tensors or self._left)
        self._drawn, self._written, self._carried, self._changed = [], [], [], {}
        self.remarks = {}

    @contextmanager
    def passes(self, loop: FrameType | None = None) -> Iterator[None]:
        """Watch the passes that are made here, up to the update if that is made here too; `loop` is what takes them."""
        self._loop = loop
        self._begin()
        hook = register_optimizer_step_pre_hook(self._before_update)
        try:
            if self._flow is None:
                yield
            else:
                with self._flow:
                    yield
            self._end()
        finally:
            hook.remove()
            self._open, self._flow, self._loop, self.iterators = False, None, None, []

    def around(self, loss: LossFunction) -> LossFunction:
        """Return a loss function that shows what it is given and what it returns."""
        if self._flow is None and not self.looks:
            return loss

        def shown(model: nn.Module, batch: Any) -> Loss:
            self.show_batch(batch)
            value = loss(model, batch)
            self.show_loss(value)
            return value

        vars(shown)["watched_loss"] = loss  # for whoever asks whether it is the loss of the steps before
        return shown

    def show_batch(self, batch: Any) -> None:
        """Note that a pass over a batch begins."""
        # What other threads change cannot be gone through.
        if self.looks and threading.get_ident() == self._thread:
            self._numbers.begin_pass(batch, self._find)
        if self._flow is not None:
            self._flow.mark_batch(batch)

    def show_loss(self, loss: Loss) -> None:
        """Note that a pass has computed a loss."""
        if self._flow is not None:
            self._flow.take_loss(loss)

    def check(self, number: int, *, several: bool) -> list[str]:
        """Return what to tell of the passes of a step; raise where `several` workers compute with what each has for itself."""
        drawn = [name for name, certain in self._drawn if certain]
        carried = [name for name, certain in self._carried if certain]
        if several and drawn:
            raise InputError(f"step {number}: {self._drawing(drawn[0])}")
        if several and carried:
            raise InputError(f"step {number}: {_carrying(carried[0])}")
        names = (
            [name for name, _ in self._drawn],
            [name for name, _ in self._carried],
            self._written,
            [*self._changed],
        )
        notes = [f"step {number}: {text}" for key, text in self.remarks.items() if key not in self.told]
        self.told.update(self.remarks)
        for found, says in zip(names, (self._drawing, _carrying, _writing, self._changing), strict=True):
            new = [name for name in found if self.told.isdisjoint((name, holder_of(name)))]
            self.told.update((*new, *filter(None, map(holder_of, new))))
            if new:
                notes.append(f"step {number}: {says(new[0])}{others_too(new)}")
        return notes

    # The passes of one step.

    def _begin(self) -> None:
        self._open = True
        followed: dict[str, Tensor] = {}
        if self.looks or self._left:
            found = self._find(keeps=self.looks and self._loop is not None)
            self.iterators = iterators_among(found.visited)
            found.visited.clear()
            followed = {
                name: one
                for name, one in found.tensors.items()
                if name in self._left and self._left[name]() is one
            }
            self._generators = found.generators
        if followed and can_follow():
            self._flow = Flow(followed, inside=filter(_is_models, followed), known=found.tensors)
        if self.looks:
            self._numbers.begin(found)
            self._held = {name: (weakref.ref(one), writes_to(one)) for name, one in found.tensors.items()}
            self._tensors, self._arrays = [], {}
            if self._steps > 1:  # the first passes may well make them
                self._tensors = [(name, *held) for name, held in self._held.items() if _is_models(name)]
                self._tensors += [
                    (name, weakref.ref(one), writes_to(one)) for name, one in found.buffers.items()
                ]
                self._arrays = _values(found)
        self._tensors = [(name, one, writes_to(one())) for name, one, _ in self._tensors]
        states = {name: state_of(one) for name, one in self._generators.items()}
        self._states = {name: state for name, state in states.items() if state is not None}

    def _before_update(self, *_: Any) -> None:
        """End the passes where an optimizer begins to step: what its hooks draw and write is the same on all workers."""
        if threading.get_ident() == self._thread:
            self._end()

    def _end(self) -> None:
        if not self._open:
            return
        self._open = False
        self._drawn = [(name, drawn) for name, drawn in self._moved() if drawn is not False]
        self._written = [
            name for name, one, version in self._tensors if one() is not None and writes_to(one()) != version
        ]
        flow = self._flow
        if flow is not None:
            flow.active = False
        if not (self.looks or flow is not None):
            return
        found = self._find()
        if flow is not None:
            self._carried = list(flow.carried(found.tensors))
        self._left = {}
        if self.looks:
            self._left = {
                name: weakref.ref(one)
                for name, one in found.tensors.items()
                if name not in self._held or not _same(one, *self._held[name])
            }
            if self.sharded:
                self._changed = self._numbers.changed(found, first=self._steps == 1)
            now = _values(found)
            self._written += [name for name, value in self._arrays.items() if now.get(name, value) != value]

    def _moved(self) -> Iterator[tuple[str, bool | None]]:
        """Yield the generators that stand elsewhere now, and whether they were drawn from."""
        for name, before in self._states.items():
            now = state_of(self._generators[name])
            if now is not None and now != before:
                if self._draws.get(name, False) is False:
                    self._draws[name] = drew_on(before, now)
                yield name, self._draws[name]

    def _find(self, *, keeps: bool = False) -> Reached:
        if self._model is None:
            raise RuntimeError("the passes belong to a step")
        return reached_from(self._model, self._others(), keeps=keeps)

    def _others(self) -> Sequence[Named]:
        task = [] if self._task is None else [("task", self._task)]
        return [*task, *loop_objects(self._loop)]

    # What is said of it.

    def _drawing(self, name: str) -> str:
        kind = kind_of(self._generators[name])
        return (
            f"the passes draw from {name}, a {kind} of their own, which follows the passes of one worker and is in no "
            "checkpoint: with another number of workers it draws other numbers. Draw from the stream of torch, numpy or random "
            "itself (leave generator= out), which is seeded for every shard; or seed it in every pass, by task.steps_done."
        )

    def _changing(self, name: str) -> str:
        return changing(name, *self._changed[name], task=self._task is not None)


def _carrying(name: str) -> str:
    return (
        f"the passes carry {name} from one to the next: it is computed with, then replaced or added to. It follows the passes of "
        "one worker's own samples, and no checkpoint holds it, so weights depend on shards and workers. Register it as a buffer, "
        "with a rule in buffers(), or keep in the batch what belongs to its samples."
    )


def _writing(name: str) -> str:
    return (
        f"forward writes to {name}, which is neither parameter nor buffer of the model. It follows the passes of this worker's "
        "samples, and no checkpoint holds it, so what is computed from it depends on shards and workers; in a log it does no "
        "harm. Register it as a buffer, with a rule in buffers()."
    )


def _is_models(name: str) -> bool:
    """Return whether something is reached from the model, and not from the task or the loop alone."""
    return not name.startswith(("task.", LOOP))


def _values(found: Reached) -> dict[str, bytes]:
    """Return what small arrays hold."""
    return {
        name: one.tobytes()
        for name, one in found.arrays.items()
        if one.nbytes <= _LARGE and not one.dtype.hasobject and not name.startswith(LOOP)
    }


def _same(now: Tensor, before: weakref.ref[Tensor], version: int) -> bool:
    return before() is now and writes_to(now) == version

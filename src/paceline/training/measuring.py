"""What all workers find out together where the user's function asks for it: metrics, and the hash of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from paceline.checkpoint.fingerprint import digest, weights_sha256
from paceline.errors import InputError
from paceline.observe import Note
from paceline.recovery.membership import EVALUATE, SAVE
from paceline.state.chunks import MODEL, collect, survey
from paceline.strategies.base import MetricsFunction
from paceline.strategies.replica import Replica
from paceline.training.averaging import averages_in_place
from paceline.training.core import EngineCore
from paceline.training.evaluation import evaluate
from paceline.training.group import RunGroup
from paceline.training.user_loop.kept_state import KeptState
from paceline.world import World, all_gather_object


@dataclass(kw_only=True)
class Measuring:
    """Asks the others, or the history of the run where they have been asked before."""

    core: EngineCore
    group: RunGroup

    def evaluate(
        self, data: Any, metrics: MetricsFunction, *, batch_size: int | None = None
    ) -> dict[str, float]:
        """Measure a data set exactly; all workers must call it."""
        name, state = "run.evaluate", self.core.state
        measured: dict[str, float]
        if self._asked_before(name):
            measured = self.core.history.outcomes.next(self.core.history.call, name)
            return measured
        with self.core.loaders.measured(data, batch_size) as loader:
            if loader.drops_rest:
                raise InputError(
                    "run.evaluate measures every sample, and this loader was opened with drop_last=True. Give run.evaluate the "
                    "DataLoader or the data set itself."
                )
            self.group.take_snapshot()

            def measure() -> dict[str, float]:
                with evaluating(self.core):
                    watched = self.core.loop.left.watched(state, metrics)
                    return evaluate(loader, watched, state.replica, state.world, state.options.seed)

            measured = self.core.recovery.together(EVALUATE, measure, called=name)
        self._note(name, measured)
        for metric in [metric for metric, value in measured.items() if math.isnan(value)]:
            text = f"the metric {metric} is not a number: its weight is 0, or a batch's value is none"
            state.emit(Note(text=text))
        return measured

    def stop(self, *, when: bool) -> bool:
        """Return whether some worker says so, and end this call of `run.steps` behind the step then; all workers must call it."""
        name, state = "run.stop", self.core.state
        if self._asked_before(name):
            told: bool = self.core.history.outcomes.next(self.core.history.call, name)
            return told
        stops: bool = self.core.recovery.together(
            EVALUATE, lambda: any(all_gather_object(state.world.comm, when)), called=name
        )
        self._note(name, stops)
        in_step = state.open_call is not None
        if in_step and state.step is not None and state.step.again:
            return stops  # the step is given once more, and asks again
        if stops and in_step:
            state.stop_at = state.position.number
        return stops

    def weights_sha256(self) -> str:
        """Return one number for all weights, wherever they are; all workers must call it."""
        name, state = "run.weights_sha256", self.core.state
        found: str
        if self._asked_before(name):
            found = self.core.history.outcomes.next(self.core.history.call, name)
            return found
        # Apart from what follows: what saves is waited for ten times as long.
        self.core.recovery.together(EVALUATE, lambda: None, called=name)
        self.core.recovery.together(SAVE, self._synchronize)
        if state.replica.whole:
            found = weights_sha256(state.replica.state()["model"])
        else:
            found = self.core.recovery.together(EVALUATE, lambda: _sharded_sha256(state.world, state.replica))
        self._note(name, found)
        return found

    def _synchronize(self) -> None:
        with self.core.loop.body.left_out():
            self.core.state.replica.synchronize()

    def _asked_before(self, asked: str) -> bool:
        """Return whether the others came by here before this worker joined them, or the run before it was resumed."""
        state, history = self.core.state, self.core.history
        state.check_between(asked)
        self._join_to_be_told()
        if history.catches_up:
            return not state.waits_to_join
        return state.open_call is None and history.outcomes.holds(history.call, asked)

    def _note(self, asked: str, outcome: Any) -> None:
        if self.core.state.open_call is None and not self.core.history.skipped:
            self.core.history.outcomes.note(self.core.history.call, asked, outcome)

    def _join_to_be_told(self) -> None:
        """Join the others before the first call of `steps`, where they found out what this worker is asked for.

        They may have measured a checkpoint's weights, which this worker cannot make: its machine may not have the files. In a run
        that nothing was saved of, it makes what they measured: the weights of the beginning.
        """
        state, history, registered = self.core.state, self.core.history, self.core.loop.registered
        waits = state.waits_to_join and state.replica_or_none is not None
        if waits and not history.calls and state.options.resume:
            history.catches_up = True
            self.core.recovery.begin()
            registered.resume(history.adopted)
            # What stands from here to the call of `steps` has been done to that state.
            history.kept = KeptState(state.replica, registered, history.adopted)


@contextmanager
def evaluating(core: EngineCore) -> Iterator[None]:
    """Measure or predict in the block: nothing of it counts as the loop's, and what it leaves behind is told."""
    state, loop = core.state, core.loop
    try:
        with loop.guard.updating(), loop.body.left_out(), averages_in_place(state.average, state.replica):
            yield
        loop.left.tell(state)
    finally:
        loop.left.release()


def _sharded_sha256(world: World, replica: Replica) -> str:
    """Return one number for weights that are sharded, a few tensors at a time; all workers ask together."""
    chunks = {key: one for key, one in replica.local_state().chunks.items() if key.startswith(f"{MODEL}/")}
    found = survey(world, chunks)
    found = replace(found, metas=dict(sorted(found.metas.items())))
    return digest((key.partition("/")[2], whole) for key, whole in collect(world, chunks, found))

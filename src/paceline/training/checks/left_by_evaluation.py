"""What an evaluation or a prediction leaves behind beside what it returns: each worker has measured its own samples alone.

`self.worst = max(self.worst, error)` in metrics() is another number on each worker, and one that loss() reads makes weights
depend on the workers. Nothing fails, so the run says it. It may serve a log only: it is no error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paceline.observe import Note
from paceline.strategies.guards.reached import Reached, reached_from
from paceline.training.checks.counters import Numbers
from paceline.training.checks.findings import others_too, writes_to
from paceline.training.state import RunState

Function = Callable[[Any, Any], Any]


@dataclass
class _Standing:
    """Tensors, with their counts of writes, and modules of others, with their modes, by name."""

    tensors: dict[str, tuple[Tensor, int]]
    modes: dict[str, tuple[nn.Module, bool]]


class LeftByEvaluation:
    """Watches what a function changes, in the evaluations 1, 2, 4, 8 and so on."""

    def __init__(self, told: set[str]) -> None:
        """`told`: what needs no note any more."""
        self._told = told
        self._evaluations = 0
        self._watched: tuple[nn.Module, str, Function] | None = None
        self._numbers, self._before = Numbers(settles=False), _Standing({}, {})

    def watched(self, state: RunState, function: Function) -> Function:
        """Return the function, watched where it is time to look; one shard alone is measured by one worker."""
        self._evaluations += 1
        self._watched = None
        if self._evaluations.bit_count() > 1 or state.options.total_shards == 1:
            return function
        self._watched = state.replica.model, "the loop" if state.task is None else "task", function
        found = self._find()
        self._numbers.begin(found)
        self._before = self._standing(found)

        def watched(given: Any, batch: Any) -> Any:
            self._numbers.begin_pass(batch, self._find)
            return function(given, batch)

        return watched

    def tell(self, state: RunState) -> None:
        """Tell what the evaluation that has ended has left."""
        if self._watched is None:
            return
        found = self._find()
        names = [*self._numbers.changed(found, first=False), *self._moved(found)]
        new = [name for name in names if name not in self._told]
        self._told.update(new)
        if new:
            text = (
                f"an evaluation or prediction changes {new[0]}, and leaves it so. It follows the samples of this worker, so "
                "what is computed with it later depends on shards and workers; in a log it does no harm. Return it as a metric: "
                f"run.evaluate and on_eval() give the same to all workers.{others_too(new)}"
            )
            state.emit(Note(text=text))

    def release(self) -> None:
        """Keep nothing of what was watched: the evaluation has ended, or failed."""
        self._watched, self._before = None, _Standing({}, {})

    def _find(self) -> Reached:
        if self._watched is None:
            raise RuntimeError("nothing is watched")
        model, name, function = self._watched
        return reached_from(model, [(name, function)], keeps=True)

    def _standing(self, found: Reached) -> _Standing:
        model = self._watched[0] if self._watched is not None else nn.Module()
        own = set(map(id, model.modules()))
        modes = {
            name: (one, one.training)
            for name, one in found.visited
            if isinstance(one, nn.Module) and id(one) not in own
        }
        tensors = {**found.tensors, **found.buffers}
        return _Standing({name: (one, writes_to(one)) for name, one in tensors.items()}, modes)

    def _moved(self, found: Reached) -> list[str]:
        """Return the tensors that were written to, and the modules that were switched."""
        now = self._standing(found)
        written = [
            name
            for name, (one, version) in self._before.tensors.items()
            if name in now.tensors and now.tensors[name][0] is one and now.tensors[name][1] != version
        ]
        switched = [
            f"{name}.training"
            for name, (module, mode) in self._before.modes.items()
            if name in now.modes and now.modes[name][0] is module and now.modes[name][1] != mode
        ]
        return [*written, *switched]

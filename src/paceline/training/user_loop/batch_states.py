"""Finds a loop that changes a registered state with each batch of a step: `seen["n"] += len(x)` counts the batches of one worker.

Workers that have as many agree on it, so a checkpoint holds it: what it holds is that of no other number of workers.
"""

from __future__ import annotations

from typing import Any

from paceline.errors import InputError
from paceline.training.user_loop.loop_state import LoopState


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

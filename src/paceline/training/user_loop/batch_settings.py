"""Finds a loop that changes the optimizer with each batch of a step: how many a worker has depends on the shards it carries.

`scheduler.step()` inside `for batch in step` ticks as often as this worker has batches. Workers that have as many agree on it,
and their weights are alike; they are those of no other number of workers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import InputError
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

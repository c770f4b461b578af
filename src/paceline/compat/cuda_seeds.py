"""Seeds and states that torch keeps for CUDA's generators until CUDA is in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_TRACKER, _QUEUE, _SETTERS = "_lazy_seed_tracker", "_queued_calls", "torch.cuda.random"


@dataclass(frozen=True)
class Waiting:
    """What waits for CUDA, as torch would call it when CUDA begins."""

    tracker: dict[str, Any]
    """The newest seed for all devices, and for one."""
    seeds: tuple[Callable[[], None], ...]
    states: tuple[tuple[Callable[[], None], Any], ...]

    def repeat(self) -> None:
        """Do it once more, in torch's order, on the device that is chosen now. CUDA is in use."""
        for call in (*(call for call, _ in self.states), *self.seeds):
            call()

    def put_back(self) -> None:
        """Have just that wait again. CUDA is not in use."""
        vars(_tracker()).update(self.tracker)
        queue = _queue()
        queue[:] = [one for one in queue if not _is_of_generator(one[0])] + [*self.states]


def waiting() -> Waiting:
    """Return what waits for CUDA, which is not in use."""
    tracker = _tracker()
    return Waiting(
        tracker=dict(vars(tracker)),
        seeds=tuple(call[0] for call in tracker.get_calls() if call),
        states=tuple(one for one in _queue() if _is_of_generator(one[0])),
    )


def _tracker() -> Any:
    return getattr(torch.cuda, _TRACKER)


def _queue() -> list[tuple[Callable[[], None], Any]]:
    queue: list[tuple[Callable[[], None], Any]] = getattr(torch.cuda, _QUEUE)
    return queue


def _is_of_generator(call: Callable[[], None]) -> bool:
    return getattr(call, "__module__", None) == _SETTERS

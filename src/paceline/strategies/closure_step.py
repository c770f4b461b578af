"""A step of an optimizer that computes loss and gradient several times (LBFGS): each time anew over the whole global batch.

All workers hold the same state and get the same sums, bit for bit, so they take the same decisions in the same order. Unlike
other updates this one changes weights before the last sum has arrived: where it cannot be finished, what it has done is undone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.strategies.guards.before_first_step import needs_closure
from paceline.strategies.placement import Placement
from paceline.strategies.result import StepResult


class ClosureStep:
    """Takes the steps of one such optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @classmethod
    def of(cls, optimizer: Optimizer, placement: Placement, *, updates_here: bool) -> ClosureStep | None:
        """Return what takes the steps of an optimizer that needs a closure, None for any other; raise where none can be given."""
        if not needs_closure(optimizer):
            return None
        if not (placement.adapts and updates_here):
            raise InputError(
                f"{type(optimizer).__name__} computes the loss several times in one step, over all parameters at once, and here "
                "no worker has all of the state. Use --strategy ddp (or dp, single), or an optimizer that works from gradients."
            )
        return cls(optimizer)

    def refuse_pieces(self) -> None:
        """Raise for a loop that takes the passes of a step itself: they would be taken once."""
        raise InputError(
            f"{type(self._optimizer).__name__} computes the loss several times in one step, so it needs it as a function: call "
            "step.compute(loss) with a loss(model, batch), in the place of `for batch in step` and step.apply()."
        )

    def take(self, evaluate: Callable[[], StepResult], max_grad_norm: float | None) -> StepResult:
        """Take one step; return what the first evaluation came to: the loss before the step, as for any other optimizer."""
        if max_grad_norm is not None:
            raise InputError(
                f"{type(self._optimizer).__name__} looks for a lower loss along its gradients, and clipped ones are not those of "
                "the loss. Leave max_grad_norm out."
            )
        found: list[StepResult] = []

        def closure() -> float:
            result = evaluate()
            found.append(result)
            return result.loss

        with self._undone():
            self._optimizer.step(closure)
        return found[0]

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Undo what the block does to weights and optimizer when it fails."""
        optimizer = self._optimizer
        held = [one for group in optimizer.param_groups for one in group["params"]]
        weights = [one.detach().clone() for one in held]
        # Keys are the parameters themselves, which stay the same objects.
        state = {key: copy.deepcopy(entry) for key, entry in optimizer.state.items()}
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for one, before in zip(held, weights, strict=True):
                    one.copy_(before)
            optimizer.state.clear()
            optimizer.state.update(state)
            raise

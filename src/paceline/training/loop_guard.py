"""Finds what a habitual loop leaves in: its own `optimizer.step()`, `zero_grad()`, `scheduler.step()` or `loss.backward()`.

`step.apply` does all of that, so each would be done twice, or to gradients of this worker alone, and nothing would fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.strategies.base import OpenReplica

WATCHED_STEPS = 3
"""Steps in which gradients are looked at, a few microseconds for each hundred parameters: a loop does the same in each."""

Gradients = list[tuple[Tensor, Tensor | None, int]]


class LoopGuard:
    """Watches the optimizer, the schedule and the gradients while the user's code has the turn."""

    def __init__(self) -> None:
        self._watched: WeakSet[Optimizer] = WeakSet()
        self._thread = threading.get_ident()
        self._updating = False
        self._in_step = False
        self._replica: OpenReplica | None = None
        self._ticks: int | None = None
        self._steps_left = WATCHED_STEPS
        self._gradients: Gradients = []

    def watch(self, replica: OpenReplica) -> None:
        """Watch this replica from now on."""
        self._replica = replica
        self._ticks = self._count_ticks()
        optimizer = replica.optimizer
        # Where the state was cut up, the loop's optimizer has other contents in another group, without this guard.
        if optimizer not in self._watched or "zero_grad" not in vars(optimizer):
            self._watched.add(optimizer)
            optimizer.register_step_pre_hook(self._before_step)
            self._guard_zero_grad(optimizer)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Let paceline itself update, in a step or before a checkpoint."""
        self.check_schedule()
        self._updating = True
        try:
            yield
        finally:
            self._updating = False
            self._ticks = self._count_ticks()

    def hand_over(self) -> None:
        """Hand a batch to the loop: from here to `take_back` what happens to gradients is the loop's doing."""
        self._in_step = True
        if self._steps_left and self._replica is not None:
            self._gradients = [
                (parameter, parameter.grad, _version(parameter.grad))
                for parameter in self._replica.model.parameters()
            ]

    def take_back(self) -> None:
        """Raise if the loop changed gradients before it gave its loss."""
        gradients, self._gradients = self._gradients, []
        for parameter, before, version in gradients:
            now = parameter.grad
            if now is None and before is not None:
                raise InputError(
                    "the loop cleared gradients inside `for batch in step`, and what earlier batches of this step had added is "
                    "lost. Leave zero_grad() out: every step begins without gradients."
                )
            if now is not before or _version(now) != version:
                raise InputError(
                    "the loop called backward() itself: those gradients are this worker's alone and divided by no weight. Call "
                    "step.backward(losses) once for each batch; a further term goes into the loss, or is an auxiliary Loss."
                )

    def applied(self) -> None:
        """Note that the gradients of a step have served."""
        self._in_step = False

    def end_step(self) -> None:
        """Note that the loop has done with a step."""
        self.check_schedule()
        self._steps_left = max(0, self._steps_left - 1)
        self._in_step = False

    def check_schedule(self) -> None:
        """Raise if somebody else moved the schedule."""
        if self._ticks is not None and self._count_ticks() != self._ticks:
            raise InputError(
                "the loop called scheduler.step() itself, so the schedule runs twice as fast: step.apply() steps the one "
                "that run.prepare was given. Leave scheduler.step() out, or do not give it to run.prepare."
            )

    def _count_ticks(self) -> int | None:
        ticks = getattr(getattr(self._replica, "scheduler", None), "last_epoch", None)
        return ticks if isinstance(ticks, int) else None

    def _elsewhere(self) -> bool:
        """Return whether this is another thread, a server's say, which is no loop of the user's."""
        return threading.get_ident() != self._thread

    def _before_step(self, *_: Any) -> None:
        if not self._updating and not self._elsewhere():
            raise InputError(
                "the loop called optimizer.step() itself: step.apply() updates the weights, and this would do so a second time. "
                "Leave optimizer.step() (and scaler.step(optimizer)) out."
            )

    def _guard_zero_grad(self, optimizer: Optimizer) -> None:
        clear: Callable[..., None] = optimizer.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            if self._in_step and not self._updating and not self._elsewhere():
                raise InputError(
                    "the loop called optimizer.zero_grad() in the middle of a step, and gradients that its batches have added "
                    "would be lost. Leave it out: every step begins without gradients."
                )
            clear(*args, **kwargs)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version  # noqa: SLF001 - torch counts writes under no other name

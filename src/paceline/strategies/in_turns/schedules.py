"""The learning-rate schedules of several optimizers as one: each goes on where its optimizer has stepped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import InputError, UnknownNameError
from paceline.strategies.epoch_schedules import PerEpoch
from paceline.strategies.guards.before_first_step import check_scheduler
from paceline.strategies.guards.schedules import step_schedule
from paceline.strategies.in_turns.optimizers import Optimizers


class Schedules:
    """Schedules by the name of their optimizer; an optimizer may have none."""

    def __init__(self, schedules: Mapping[str, LRScheduler], optimizer: Optimizers) -> None:
        for name, one in schedules.items():
            if name not in optimizer.optimizers:
                raise UnknownNameError("optimizer", name, optimizer.optimizers)
            check_scheduler(one, optimizer[name])
            if isinstance(one, PerEpoch):
                raise InputError(
                    f"the scheduler of {name!r} is a paceline.{type(one).__name__}, and those of several optimizers count their "
                    "updates. Make one that does (LambdaLR, CosineAnnealingLR)."
                )
        self.schedules, self.optimizer = dict(schedules), optimizer

    @property
    def last_epoch(self) -> int:
        """How often they were stepped, all together."""
        return sum(getattr(one, "last_epoch", 0) for one in self.schedules.values())

    def step(self) -> None:
        """Step those whose optimizer has just stepped."""
        turn = self.optimizer.turn
        for name, one in self.schedules.items():
            if turn in (None, name):
                step_schedule(one)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each."""
        return {name: one.state_dict() for name, one in self.schedules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of each."""
        for name, one in self.schedules.items():
            one.load_state_dict(state[name])

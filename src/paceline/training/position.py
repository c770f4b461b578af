"""Where a run stands: (epoch, step) and nothing else, the same on every worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Position:
    """The step that comes next."""

    epoch: int = 0
    step: int = 0
    """Within the epoch."""
    number: int = 0
    """From the beginning of the run."""

    def after_step(self) -> Position:
        """Stand behind one more step of the same epoch."""
        return Position(self.epoch, self.step + 1, self.number + 1)

    def next_epoch(self) -> Position:
        """Stand at the beginning of the next epoch."""
        return Position(self.epoch + 1, 0, self.number)

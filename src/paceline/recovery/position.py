"""Where a run stands: which call of `run.steps`, (epoch, step) and nothing else, the same on every worker."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Position:
    """The step that comes next."""

    epoch: int = 0
    """From the beginning of the run: no two calls of `run.steps` share one, so none repeats another's order."""
    step: int = 0
    """Within the epoch."""
    number: int = 0
    """From the beginning of the run."""
    phase: int = 0
    """Which call of `run.steps`, from 0."""
    first_epoch: int = 0
    """The epoch in which that call began."""
    first_number: int = 0
    """The step at which that call began."""

    def after_step(self) -> Position:
        """Return the position after one more step of the same epoch."""
        # Not `replace`, which looks at every field first: this is called in every step.
        return Position(
            self.epoch, self.step + 1, self.number + 1, self.phase, self.first_epoch, self.first_number
        )

    def next_epoch(self) -> Position:
        """Return the beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, step=0)

    def next_phase(self) -> Position:
        """Return the beginning of the next call of `run.steps`: an epoch of its own, though the one before was left early."""
        epoch = self.epoch + 1 if self.step else self.epoch
        return Position(epoch, 0, self.number, self.phase + 1, epoch, self.number)

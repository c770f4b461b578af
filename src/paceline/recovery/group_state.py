"""Whom a worker trains with, what it holds and where it stands: the record that a run and its recovery share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import InputError
from paceline.observe import Event
from paceline.recovery.position import Position
from paceline.strategies.replica import Replica, Strategy
from paceline.world import World
from paceline.world.world import THREADS


@dataclass(kw_only=True)
class GroupState:
    """One worker's place in the group of the moment."""

    world: World
    """Another one after each change of the group."""
    strategy: Strategy
    emit: Callable[[Event], None]
    """Tells everyone who listens; only rank 0 has listeners."""
    workers: int
    """How many the run began with, on all machines; servers are not counted."""
    position: Position = field(default_factory=Position)
    replica_or_none: Replica | None = None
    """What was prepared for this group, once it was."""
    parameters: int = 0
    """Of the model, on all workers together."""
    open_call: int | None = None
    """The call of `run.steps` that has the turn, None outside of them."""

    @property
    def replica(self) -> Replica:
        """What `run.prepare` made."""
        if self.replica_or_none is None:
            raise InputError("run.steps was called before run.prepare(model, optimizer). Prepare first.")
        return self.replica_or_none

    @property
    def transport(self) -> str:
        """What tensors really travel by between the workers of the present group."""
        return THREADS if self.strategy.threaded and self.workers > 1 else self.world.transport

    @property
    def repeatable(self) -> bool:
        """Whether what is done outside of the steps can be done once more."""
        return False

"""What recovery knows of a run: whom a worker trains with, what it holds, where it stands, what it has done with the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import InputError
from paceline.observe import Event
from paceline.recovery.agreement import NEWCOMER, OpenBody
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
    """Notifies everyone who listens; only rank 0 has listeners."""
    workers: int
    """How many the run began with, on all machines; servers are not counted."""
    position: Position = field(default_factory=Position)
    replica_or_none: Replica | None = None
    """What was prepared for this group, once it was."""
    parameters: int = 0
    """Of the model, on all workers together."""
    open_call: int | None = None
    """The call of `run.steps` that has the turn, None outside of them."""
    finished: int = 0
    """How many operations it has finished with the others: steps, evaluations, checkpoints; NEWCOMER before it has joined."""
    outcome: Any = None
    """What the last of them came to."""
    missed: bool = False
    """Whether the operation in flight was finished by others, and its outcome taken over from them."""
    asks_in_body: bool = False
    """Whether the body of the user's loop does things with all workers: it may do so after a step that broke, too."""
    broken_body: OpenBody | None = None
    """The attempt at a step in whose body some are, to no effect: all go through it before they take a step together."""
    stopping: bool = False
    """Whether the group has formed only to save a checkpoint and to end."""
    save_asked: bool = False
    """Whether the group is to save a checkpoint before its next step."""
    broken_at: float | None = None
    """When the last group broke, until a step has been finished after that."""
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    """The changes of the group that this run came through, each with the seconds it cost."""

    @property
    def waits_to_join(self) -> bool:
        """Whether this worker was started to join a run, and has not yet."""
        return self.finished == NEWCOMER

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

"""What recovery asks of the run that it keeps together."""

from __future__ import annotations

from typing import Any, Protocol

from paceline.recovery.agreement import OpenBody
from paceline.recovery.handover import StateSource
from paceline.recovery.position import Position
from paceline.state.chunks import LocalState
from paceline.strategies.replica import Replica


class GroupHooks(Protocol):
    """How a run leaves a group and enters the next."""

    @property
    def open_body(self) -> OpenBody | None:
        """The step in whose body a loop of the user's own is, where nothing has come of it, or nothing will."""

    def leave_group(self) -> None:
        """Release everybody: nobody may wait for this worker in the old group."""

    def break_off(self, *, in_step: bool) -> tuple[bool, bool]:
        """Put back what a body did in a step that broke; return whether it wrote to the model in it, and after the last."""

    def prepare_group(self, before: Replica | None) -> Replica:
        """Prepare for the group that has formed, with what the replica of the one before was made of."""

    def enter_group(self, position: Position, replica: Replica) -> None:
        """Take this worker's place in the group that has formed.

        `position` is where the run goes on: after a step that others finished and this worker has yet to count.
        """


class StateHooks(Protocol):
    """How the state of a run beside its replica goes from worker to worker, and back to an earlier step."""

    def shared_state(self) -> dict[str, Any]:
        """Return what a worker that joins must know beside the model."""

    def adopt(self, position: Position, shared: dict[str, Any]) -> None:
        """Continue from where the others stand, who returned `shared`."""

    def finish_step(self, shared: dict[str, Any]) -> None:
        """Take over the optimizer's options of right after a step that others have finished, not those of further on."""

    def newest_checkpoint(self) -> int | None:
        """Wait for a checkpoint that is being written, and return the step of the newest on disk."""

    def restore(self, replica: Replica, source: StateSource, held: LocalState | None) -> Position:
        """Load into a new replica its part of the state from where it is, and return where the run goes on."""

    @property
    def kernels(self) -> str:
        """What this worker's kernels are chosen by, where bits are promised; empty where they are not."""

    @property
    def registers_states(self) -> bool:
        """Whether the loop has registered states of its own."""

    def put_states_back(self) -> None:
        """Reset the loop's own states to what they were at the step whose state `restore` has loaded."""

    def go_back(self, position: Position) -> None:
        """Stand at an earlier step again."""


class RunHooks(GroupHooks, StateHooks, Protocol):
    """All of it."""

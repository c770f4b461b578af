"""What the membership of a run can decide: told to the supervisor, which has it carried out."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.launch.failures import WorkerFailure


@dataclass(frozen=True)
class Break:
    """Ask a worker to leave the group of this generation."""

    member: int
    generation: int
    at_once: bool
    leaving: bool = False
    """Whether it is to leave the run, too."""


@dataclass(frozen=True)
class Assign:
    """Assign a worker its place in the next group."""

    member: int
    rank: int
    size: int
    generation: int
    reason: str
    shares: tuple[int, ...] | None = None
    stop: bool = False
    """Whether the group only forms to save a checkpoint together, and to end."""
    save: bool = False
    """Whether it saves a checkpoint before its next step."""


@dataclass(frozen=True)
class Release:
    """Release a worker: it is not needed any more."""

    member: int


@dataclass(frozen=True)
class Begin:
    """Have a worker of a role begin: all have met."""

    member: int


@dataclass(frozen=True)
class Tell:
    """Notify a worker that another is lost, and that it goes on without it."""

    member: int
    lost: int
    """The rank of the one that is lost."""


@dataclass(frozen=True)
class Start:
    """Start workers that will join."""

    count: int


@dataclass(frozen=True)
class StartOver:
    """Nobody holds the state any more: start all workers from the last checkpoint."""

    failure: WorkerFailure


@dataclass(frozen=True)
class AwaitCause:
    """Wait a moment: all that is known are workers that lost another one, and whoever began it may yet say why."""


@dataclass(frozen=True)
class GiveUp:
    """End the run, because of this."""

    failure: WorkerFailure


@dataclass(frozen=True)
class Expel:
    """End a worker at once, and count it as lost whether or not it goes: one that the kernel holds cannot."""

    member: int
    failure: WorkerFailure


@dataclass(frozen=True)
class Say:
    """Show the user something about the group."""

    text: str


Action = Break | Assign | Release | Begin | Tell | Start | StartOver | AwaitCause | GiveUp | Expel | Say

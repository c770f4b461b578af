"""Who belongs to the group: what a worker tells whoever started it, and what it is told. Imports no torch.

The launcher decides. A worker whose group broke says where it stands and is given its place in the next one; a worker
that was started to join a run in progress says that it is ready, and waits for the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.world.env import Identity

if TYPE_CHECKING:
    from paceline.world.interruption import Interruption

STEP = "step"
"""At the beginning of a step, where others may join."""
BODY = "body"
"""In a step, in the body of a loop of the user's own that evaluates or saves at times, and may do so behind `apply`."""
EVALUATE = "evaluate"
SAVE = "save"
SAVE_ASKED = "a checkpoint is asked for"
"""Why a group forms in which nobody has come or gone."""
STATE_LOST = "a worker took its part of the state with it"
"""How the error begins of those who cannot go on without another one: what became of that one is the cause."""


class LeaveRunError(BaseException):
    """This worker is not needed any more; it ends well, and the others go on."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a worker stood when its group broke."""

    operation: int
    """How many things it has done together with the others: steps, evaluations, checkpoints."""
    kind: str
    """What it was about to do, or doing."""
    step: int
    error: str = ""
    """What kept it from the others, where the group that it leaves never came about."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker's place in the next group."""

    identity: Identity
    generation: int
    shares: tuple[int, ...] | None = None
    """How many shards each rank carries, where they are not dealt out evenly."""
    reason: str = ""
    """Why there is a new group, in a few words."""
    stop: bool = False
    """Whether the group only forms to save a checkpoint together, and to end."""
    save: bool = False
    """Whether it saves a checkpoint before its next step."""


class ElasticMembership(Protocol):
    """A worker's line to the one who gives it its place in the next group."""

    @property
    def leaving(self) -> bool:
        """Whether this worker is to leave the run."""

    def attach(self, generation: int, interruption: Interruption) -> None:
        """Have a group's interruption raised when that group is to be left at once."""

    def report_error(self, error: Exception, step: int) -> None:
        """Report an exception of the user's code, in an evaluation that all are to do once more."""

    def next_place(self, standing: Standing | None) -> Place:
        """Report where this worker stands (a newcomer passes None), and wait for its place in the next group."""


class Membership(Protocol):
    """What a worker knows of its group from whoever started it."""

    newcomer: bool
    """Whether this worker joins a run that is in progress."""

    @property
    def elastic(self) -> ElasticMembership | None:
        """Who forms the next group when a worker is lost; None where that ends the run."""

    @property
    def change_wanted(self) -> bool:
        """Whether the group is to be left at the beginning of the next step, because somebody joins or leaves."""

    def begin(self) -> None:
        """Report that training begins: from now on a lost worker does not end the run."""


class FixedMembership:
    """The membership of a world that nobody changes: one lost worker ends it."""

    newcomer = False
    elastic = None
    change_wanted = False

    def begin(self) -> None:
        """Emit to nobody."""

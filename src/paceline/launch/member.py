"""One worker as the launcher's decisions see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from paceline.recovery.membership import Standing


class State(Enum):
    """How far a worker is."""

    STARTING = auto()
    WAITING = auto()
    """Ready to join a run in progress."""
    TRAINING = auto()
    BROKEN = auto()
    """Out of its group, waiting for its place in the next."""
    RELEASED = auto()
    ENDED = auto()


@dataclass
class Member:
    """One worker as the decider sees it."""

    number: int
    """Which worker it is, for all its life; ranks change."""
    host: int
    """Which machine, the leader's first."""
    rank: int
    """In its group; -1 as long as it is in none."""
    place: int = -1
    """Its rank in the group that it belongs to, with those who are yet to be replaced."""
    newcomer: bool = False
    state: State = State.STARTING
    leaving: bool = False
    standing: Standing | None = field(default=None, repr=False)
    since: float = 0.0
    """When it was started, or released."""
    joined: int = 0
    """The generation that it came into the group with."""

"""Distinguishes a lost peer from other failures."""

from __future__ import annotations

from paceline.errors import PacelineError
from paceline.world.interruption import InterruptedWaitError
from paceline.world.peer_failure_messages import names_a_lost_peer
from paceline.world.shared_memory import PeerLostError


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an operation failed because another worker is gone."""
    return isinstance(error, PeerLostError | InterruptedWaitError) or names_a_lost_peer(error)


def may_come_of_a_break(error: BaseException) -> bool:
    """Return whether a broken group can have caused this: a KeyError of the user's code has another reason.

    What breaks an operation in flight comes as one of these, or is what the user's code made of one of them.
    """
    while not isinstance(error, RuntimeError | OSError | PacelineError):
        before = error.__cause__ or error.__context__
        if before is None:
            return False
        error = before
    return True

"""Tells a lost peer from other failures."""

from __future__ import annotations

from paceline.world.interruption import InterruptedWaitError
from paceline.world.lane import PeerLostError

_PHRASES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "socket closed",
    "connection was likely closed",
    "timed out waiting",
    "connection was aborted",
    "communicator was aborted",
)


def is_lost_peer(error: BaseException) -> bool:
    """Say whether an operation failed because another worker is gone; torch tells only by its words."""
    if isinstance(error, PeerLostError | InterruptedWaitError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _PHRASES)

"""Tells a lost peer from other failures."""

from __future__ import annotations

from paceline.world.interruption import InterruptedWaitError
from paceline.world.lane import PeerLostError
from paceline.world.last_words import tell_of_a_lost_peer


def is_lost_peer(error: BaseException) -> bool:
    """Say whether an operation failed because another worker is gone."""
    return isinstance(error, PeerLostError | InterruptedWaitError) or tell_of_a_lost_peer(error)

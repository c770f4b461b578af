"""What torch and the kernel say when another worker is gone. Imports no torch."""

from __future__ import annotations

_PHRASES = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "socket closed",
    "connection was likely closed",
    "timed out waiting",
    "timed out connecting",
    "connect timeout",
    "application timeout caused pair closure",
    "connection was aborted",
    "communicator was aborted",
    "remote process exited",
    "ncclremoteerror",
)


def tell_of_a_lost_peer(error: BaseException) -> bool:
    """Say whether an operation failed because another worker is gone; torch tells only by its words."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _PHRASES)

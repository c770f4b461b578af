"""What torch and the kernel say when another worker is gone, and where they say it. Imports no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

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
_LIBRARIES = ("gloo/", "nccl")
"""What the libraries that carry the messages sign theirs with: a handle may be waited for in the user's own code."""
_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_READING = _OURS + "data" + os.sep
"""Here the user's data is read and nothing is exchanged."""
_EXCHANGING = ("distributed", "nn" + os.sep + "parallel", "autograd", "_ops.py", "futures")
"""The parts of torch in which workers talk to each other; a backward pass does, too."""


def names_a_lost_peer(error: BaseException) -> bool:
    """Return whether an operation failed because another worker is gone.

    Torch tells only by its words, and the user's code may fail with the same ones, where a file server is gone say. So they
    count only where workers talk to each other: in the innermost frame, or in the words of the library that does.
    """
    if not isinstance(error, RuntimeError):
        return False
    text = text_of(error).lower()
    if not any(phrase in text for phrase in _PHRASES):
        return False
    return any(library in text for library in _LIBRARIES) or _exchanges(_origin(error.__traceback__))


def text_of(error: BaseException) -> str:
    """Return the words of an exception as text that can be written; some raise when they are asked."""
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001  (the user's own __str__ may raise anything)
        text = f"<its words cannot be shown: {type(second).__name__}>"
    return writable(text)


def writable(text: str) -> str:
    """Return a text with what UTF-8 has no bytes for spelled out: a file name may hold it."""
    return text.encode(errors="backslashreplace").decode()


def _origin(trace: TracebackType | None) -> str:
    """Return the file of the innermost frame."""
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename


def _exchanges(file: str) -> bool:
    if file.startswith(_OURS):
        return not file.startswith(_READING)
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is None:
        return False
    home = os.path.dirname(torch) + os.sep  # noqa: PTH120  (as text, like the file)
    return file.startswith(tuple(home + part for part in _EXCHANGING))

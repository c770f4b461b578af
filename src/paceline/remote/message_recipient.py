"""To whom the message goes that this thread is writing: references in it are that worker's from then on."""

from __future__ import annotations

from threading import get_ident
from typing import Any

Message = tuple[str, list[Any] | None]
"""The worker it goes to, and for a call the holds that it hands over: they are taken back where it cannot be sent or read."""
NOTHING: Message = ("", None)
_messages: dict[int, Message] = {}
"""By the thread's number: what Python keeps for a thread of torch's is gone each time that leaves Python."""


def begin(worker: str, given: list[Any] | None = None) -> Message:
    """Write to a worker from now on; gives what was written before."""
    thread = get_ident()
    before = _messages.get(thread, NOTHING)
    _messages[thread] = worker, given
    return before


def end(before: Message) -> None:
    """Go on with what was written before."""
    _messages[get_ident()] = before


def written() -> Message:
    """Return what this thread is writing."""
    return _messages.get(get_ident(), NOTHING)

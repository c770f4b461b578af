"""A link on a selector: keeps the two in step, so that a link that is over never leaves a stale descriptor behind."""

from __future__ import annotations

import selectors
from collections.abc import Callable

from paceline.launch.nodes.link import Link, Message

Receive = Callable[[Message], None]


class Wire:
    """One link, served by the loop that owns the selector."""

    def __init__(self, link: Link, selector: selectors.BaseSelector, receive: Receive) -> None:
        self._link, self._selector = link, selector
        self.receive = receive
        """Who takes the messages."""
        self._registered = link.fileno() >= 0
        if self._registered:
            selector.register(link, selectors.EVENT_READ, self.serve)

    @property
    def is_open(self) -> bool:
        """Return whether both ends have proved themselves and the connection stands."""
        return self._link.is_open

    @property
    def peer(self) -> str:
        """What the other end is called."""
        return self._link.peer

    def rename(self, peer: str) -> None:
        """Call the other end by a better name, in sentences about it."""
        self._link.peer = peer

    def send(self, message: Message) -> None:
        """Send a message; a link that is over drops it."""
        self._link.send(message)
        self._register()

    def tick(self, now: float) -> float:
        """Keep the link alive; give the seconds until something is due again."""
        due = self._link.tick(now)
        self._register()
        return due

    def lost(self, now: float) -> str | None:
        """Return in one sentence why the link is over, or None while it is not."""
        reason = self._link.lost(now)
        self._register()
        return reason

    def close(self) -> None:
        """Let go of it."""
        self._link.close()
        self._register()

    def serve(self) -> None:
        """Take in what has arrived, and hand the network what waits."""
        messages = self._link.on_readable()
        self._link.on_writable()
        self._register()
        for message in messages:
            self.receive(message)

    def _register(self) -> None:
        if not self._registered:
            return
        if self._link.fileno() < 0:
            self._registered = False
            self._selector.unregister(self._link)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._link.wants_to_write else 0)
        if self._selector.get_key(self._link).events != wanted:
            self._selector.modify(self._link, wanted, self.serve)

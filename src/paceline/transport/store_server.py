"""Serves a key-value store to the processes of a run: on a Unix socket for one machine, over CURVE for several. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from paceline.transport.key_value import Asker, KeyValueTable
from paceline.transport.router import Handlers, Peer, Router
from paceline.transport.secret import Secret

SILENCE_S = 60.0
"""A peer on another machine of which nothing is heard for so long is gone."""


class StoreServer:
    """One store, served by a thread of its own until it is closed. A request is its number, what to do, keys and values."""

    def __init__(
        self, address: str, *, secret: Secret | None = None, refused: Callable[[int], None] = lambda _: None
    ) -> None:
        """Listen on `ipc://PATH`, or on `tcp://HOST:*` with the run's secret."""
        self._table, self._lock = KeyValueTable(), threading.Lock()
        handlers = Handlers(message=self._take, gone=self._forget, refused=refused)
        # Over a network a peer may go without a word.
        self._router = Router(
            address, handlers, secret=secret, silence_s=None if secret is None else SILENCE_S
        )
        self.address = self._router.address
        """Where it listens, with the port that was chosen."""
        self.requests = 0
        """How many requests it has had."""

    def close(self) -> None:
        """Stop serving."""
        self._router.close()

    def _take(self, peer: Peer, frames: list[bytes]) -> None:
        self.requests += 1
        number, *request = frames
        self._answer((peer, number), request)

    def set(self, key: str, value: str) -> None:
        """Store a value of the server's own."""
        self._answer(None, [b"set", key.encode(), value.encode()])

    def _answer(self, who: Asker | None, request: Sequence[bytes]) -> None:
        with self._lock:
            answers = self._table.take(who or (b"", b""), request)
        for (asker, of), answer in answers:
            if asker:
                self._router.send(asker, [of, *answer])

    def _forget(self, peer: Peer, _: str) -> None:
        with self._lock:
            self._table.forget(peer)

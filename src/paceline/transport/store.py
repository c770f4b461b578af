"""A torch `Store` on the launcher's key-value store: waits are answered when the keys are there, and end when told to.

torch's own TCPStore takes keys from anybody who reaches its port. This one is reached through a folder that only the user may
enter, or with the run's secret.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import zmq
from torch.distributed.distributed_c10d import Store

from paceline.errors import PacelineError
from paceline.transport import curve
from paceline.transport.key_value import OK, unpack
from paceline.transport.router import LARGEST_MESSAGE, keep_alive
from paceline.transport.secret import Secret
from paceline.transport.store_server import SILENCE_S

TIMEOUT_S = 300.0
AGAIN_S = 5.0
"""How often to ask again, where asking twice does no harm."""
_WAITING = (b"get", b"gather", b"wait")
_REPEATABLE = (*_WAITING, b"check", b"set")
_numbers = itertools.count()


class StoreTimeoutError(RuntimeError):
    """Keys were not there in time, or nobody answered."""


_sockets: set[zmq.Socket[bytes]] = set()
"""All that are open: held here, so that the garbage collector never comes to one before the store that it belongs to."""


def _close(socket: zmq.Socket[bytes]) -> None:
    socket.close(0)
    _sockets.discard(socket)


class _Connections:
    """Connections to the server that no thread uses at the moment: one that waits keeps its own."""

    def __init__(self, address: str, secret: Secret | None) -> None:
        self._address, self._secret = address, secret
        # The process's own, which is never ended: one that the garbage collector ends waits for ever for sockets that it has not
        # come to yet.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._free: list[zmq.Socket[bytes]] = []
        self._process = os.getpid()

    def __del__(self) -> None:
        """Close them: every request has its answer, or nobody waits for it any more."""
        if os.getpid() == self._process:
            for socket in self._free:
                _close(socket)

    @contextlib.contextmanager
    def one(self) -> Iterator[zmq.Socket[bytes]]:
        """Lend a connection; one whose use ends in an exception is not used again: its answer may still come."""
        if os.getpid() != self._process:
            raise PacelineError("the store of a run was used in a process that was forked from a worker")
        try:
            socket = self._free.pop()
        except IndexError:
            socket = self._open()
        try:
            yield socket
        except BaseException:
            _close(socket)
            raise
        self._free.append(socket)

    def _open(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        if self._secret is not None:
            curve.call(socket, self._secret)
            # A firewall may forget a connection on which nothing is said for hours.
            keep_alive(socket, SILENCE_S)
        socket.linger, socket.sndhwm, socket.rcvhwm = 1000, 0, 0
        socket.ipv6 = "[" in self._address
        socket.connect(self._address)
        _sockets.add(socket)
        return socket


class RunStore(Store):
    """The store that the workers of a run meet at."""

    timeout: timedelta
    """How long a wait may take: torch's own property, which its stubs leave out."""

    def __init__(
        self,
        address: str,
        *,
        secret: Secret | None = None,
        timeout_s: float = TIMEOUT_S,
        timed_out: Callable[[str], Exception] = StoreTimeoutError,
        connections: _Connections | None = None,
    ) -> None:
        super().__init__()
        self._timed_out = timed_out
        self._connections = connections or _Connections(address, secret)
        self._address = address
        # Kept in torch's half of the store alone: through a PrefixStore, torch sets it there and asks nobody.
        self.set_timeout(timedelta(seconds=timeout_s))
        self._together = 0
        self._clones: list[RunStore] = []
        self._fetched: dict[str, bytes] = {}
        self._interrupted: Callable[[], BaseException] | None = None
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._bell)

    def for_group(self, *, timeout_s: float, timed_out: Callable[[str], Exception]) -> RunStore:
        """Return the same store for one group, whose waits can be interrupted without those of another."""
        return RunStore(
            self._address, timeout_s=timeout_s, timed_out=timed_out, connections=self._connections
        )

    @contextlib.contextmanager
    def gathering(self, size: int) -> Iterator[None]:
        """Read what so many ranks write at once: gloo, while a group forms, asks for every rank's address one by one.

        It waits for each as long as a connection may take. That goes for connecting: until all have come, this store's own
        time-out counts.
        """
        self.check([])  # connects here and now: of the sockets that are opened meanwhile, none is the store's
        self._together = size
        try:
            yield
        finally:
            self._together = 0
            self._fetched.clear()

    def interrupt(self, error: Callable[[], BaseException]) -> None:
        """End every wait for a key, and each that begins from now on, with this exception."""
        self._interrupted = error
        os.eventfd_write(self._bell, 1)

    # What torch asks for.

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._request(b"set", key, value)

    def get(self, key: str) -> bytes:
        """Return a value when it is there."""
        with self._lock:
            fetched = self._fetched.pop(key, None)
        return fetched if fetched is not None else self._request(b"get", key)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return int(self._request(b"add", key, str(amount))[0])

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self._request(b"check", *keys) == [b"1"]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Store a value in place of an expected one, and return which is there."""
        return self._request(b"compare_set", key, expected, desired)[0]

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self._request(b"delete", key) == [b"1"]

    deleteKey = delete_key  # noqa: N815  (by this name torch's C++ half asks for it)

    def append(self, key: str, value: str | bytes) -> None:
        """Add bytes at the end of a value."""
        self._request(b"append", key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several values when all are there."""
        return self._request(b"get", *keys)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Store several values."""
        self._request(b"set", *itertools.chain.from_iterable(zip(keys, values, strict=True)))

    def clone(self) -> RunStore:
        """Return another handle on the same store."""
        made = self.for_group(timeout_s=self.timeout.total_seconds(), timed_out=self._timed_out)
        self._clones.append(made)  # torch's half of a store does not keep Python's
        return made

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._request(b"count")[0])

    getNumKeys = num_keys  # noqa: N815

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there, within `timeout` or, without one, this store's own."""
        with self._lock:
            if all(key in self._fetched for key in keys):
                return
        folder = self._folder_of_ranks(keys)
        if folder is None:
            self._request(b"wait", *keys, within=None if self._together else timeout)
            return
        values = unpack(self._request(b"gather", folder, str(self._together))[0])
        with self._lock:
            self._fetched |= {f"{folder}/{rank}": value for rank, value in enumerate(values)}

    def _folder_of_ranks(self, keys: list[str]) -> str | None:
        """Return where the keys of all ranks are where one rank's was asked for: `.../0` to `.../size-1`."""
        folder, slash, rank = keys[0].rpartition("/")
        is_one = len(keys) == 1 and slash and rank.isdecimal() and int(rank) < self._together
        return folder if is_one else None

    def _request(self, what: bytes, *parts: str | bytes, within: timedelta | None = None) -> list[bytes]:
        number = next(_numbers).to_bytes(8)
        frames = [one.encode() if isinstance(one, str) else bytes(one) for one in parts]
        if sum(map(len, frames)) > LARGEST_MESSAGE:
            raise PacelineError(f"the run's store takes requests of {LARGEST_MESSAGE} bytes at most")
        waits = what in _WAITING
        patience = self.timeout if within is None else within
        limit = time.monotonic() + patience.total_seconds()
        with self._connections.one() as socket:
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            if waits:
                poller.register(self._bell, zmq.POLLIN)
                self._check_interrupted()
            socket.send_multipart([number, what, *frames])
            ask_again = time.monotonic() + AGAIN_S
            while True:
                left = limit - time.monotonic()
                ready = dict(poller.poll(max(0, int(1000 * min(left, AGAIN_S)) + 1)))
                if not ready and what in _REPEATABLE and time.monotonic() >= ask_again:
                    # What was asked on a connection that broke is lost with it; a second answer is passed over.
                    socket.send_multipart([number, what, *frames])
                    ask_again = time.monotonic() + AGAIN_S
                if socket in ready:
                    answered, status, *values = socket.recv_multipart()
                    if answered != number:
                        continue
                    if status != OK:
                        raise PacelineError(
                            f"the run's store refused a request: {b' '.join(values).decode()}"
                        )
                    return values
                if waits:
                    self._check_interrupted()
                if left <= 0:
                    raise self._timed_out(_too_late(waits, parts, patience))

    def _check_interrupted(self) -> None:
        if self._interrupted is not None:
            raise self._interrupted()


def _too_late(waits: bool, parts: tuple[Any, ...], patience: timedelta) -> str:
    if waits:
        return f"timed out waiting for {', '.join(str(one) for one in parts[:8])}"
    return f"the run's store gave no answer within {patience.total_seconds():g} s"

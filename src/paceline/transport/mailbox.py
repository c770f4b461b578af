"""One process's end of the messages between processes: an inbox, and a way to each peer that it has something to say to.

On one machine messages go through a socket file in a folder that nobody else may enter, and large buffers through memory that
both see (`shared_buffers.py`). Between machines they go over TCP: whoever connects proves to know the secret (`admission.py`),
and every frame is sealed (`sealing.py`), so nothing depends on the network. A peer whose connection breaks is reported at once.
No torch.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import PacelineError
from paceline.transport.addresses import at
from paceline.transport.admission import Admission, listen
from paceline.transport.incoming import EndedError, Incoming, Receive, Received
from paceline.transport.outgoing import Outgoing, PeerAddress
from paceline.transport.readers import Job, Readers
from paceline.transport.sealing import BOOT_BYTES, Seal, SealError
from paceline.transport.shared_buffers import Arena, SharedView
from paceline.transport.turns import Turn, Turns

__all__ = ["FORKED", "UNSEALED", "Mailbox", "PeerAddress", "Receive", "Received"]
UNSEALED = "a message does not carry this run's secret"
FORKED = (
    "calls between workers cannot be made from a process that was forked from one. "
    "Make them in the worker itself, not in a loading process of its data, for example."
)
_FOLDER = "paceline-calls-"
_LONGEST_PATH = 100
"""A socket's path has 107 characters at most on Linux."""
_PARTING_S = 5.0
"""How long a thread of ours that is giving a message on may take to end."""


class _Reading(threading.local):
    """Whether this thread takes messages, for which others wait."""

    now = False


class Mailbox:
    """An inbox that listens from `bind` on, takes messages from `start` on, and ends with `close`."""

    def __init__(self, secret: bytes) -> None:
        self.boot = secrets.token_bytes(BOOT_BYTES)
        self._secret = secret
        self._process = os.getpid()
        self._near: socket.socket | None = None
        self._far: socket.socket | None = None
        """The inbox for other machines. What comes in there is sealed; what comes from this machine never goes that way."""
        self._ways: dict[str, Outgoing] = {}
        self._senders: dict[bytes, Outgoing] = {}
        self._incoming: dict[str, Incoming] = {}
        self._readers = Readers()
        self._turns = Turns()
        self._admission: Admission | None = None
        self._arena: Arena | None = None
        self._arena_failed = False
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._socket_file: Path | None = None
        self._closing = self._refused = False
        self._reading = _Reading()
        self._receive: Receive = lambda *_: None
        self._submit: Callable[[Job], None] = _run_apart

    def bind(self, folder: str | None, host: str | None) -> tuple[str, str]:
        """Listen in a folder of this machine and, where a host is given, on that address of it; returns both addresses.

        Without a folder one is made, and removed at the end.
        """
        if folder is None or len(folder) > _LONGEST_PATH - 32:
            near = tempfile.gettempdir()
            place = near if len(near) < _LONGEST_PATH // 2 else "/tmp"  # noqa: S108  (mkdtemp makes it safe)
            self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=place))
            folder = str(self._folder)
        self._socket_file = Path(folder) / self.boot.hex()[:12]
        self._near = listen(socket.AF_UNIX, str(self._socket_file))
        local = f"ipc://{self._socket_file}"
        if host is None:
            return local, ""
        self._far = listen(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, 0))
        return local, f"tcp://{at(host, self._far.getsockname()[1])}"

    def start(
        self,
        peers: dict[str, PeerAddress],
        receive: Receive,
        lose: Callable[[str], None],
        *,
        submit: Callable[[Job], None] | None = None,
        prepare: Job = lambda: None,
    ) -> None:
        """Take messages of these peers, each given to `receive` with its sender's name; `lose` hears who is gone.

        What `receive` returns is done by the thread that took the message, or given to `submit` where that thread has
        something else to do. Threads call `prepare` when they begin.
        """
        self._receive, self._submit = receive, submit or self._submit

        def lost(name: str) -> None:
            if not self._closing:
                lose(name)

        for name, entry in peers.items():
            way = Outgoing(name, entry, self._secret, self.boot, self._readers, self._shared, lost)
            self._ways[name] = self._senders[entry.boot] = way
        self._turns.start()
        self._readers.start(prepare)
        self._admission = Admission(self._secret, self.boot, self._near, self._far, self._admit, self._refuse)

    def send(
        self,
        name: str,
        content: bytes,
        frames: Sequence[memoryview],
        *,
        deadline: float = math.inf,
        waits: bool = True,
        copies: bool = False,
    ) -> bool:
        """Send a message, from any thread; False where the peer is gone.

        It waits for a peer that takes nothing, up to the deadline; the frames may be written to as soon as it returns, and
        while it waits if it `copies` them.
        """
        self._check_process()
        return self._ways[name].send(
            content, frames, deadline=deadline, waits=waits and not self._reading.now, copies=copies
        )

    def reading(self, name: str) -> Reading:
        """Return a block in which this thread takes a peer's messages itself, unless another one does already."""
        self._check_process()
        return Reading(self, self._incoming.get(name))

    def forget(self, name: str) -> None:
        """Send nothing more to a peer that is gone."""
        way = self._ways[name]
        way.end()
        incoming = self._incoming.get(name)
        if incoming is not None:
            incoming.end()
        _clear_away(way.entry.address)

    def close(self) -> None:
        """End: what was sent arrives, as far as the operating system has taken it."""
        if self._closing or os.getpid() != self._process:  # a forked one would end its parent's connections
            return
        self._closing = True
        if self._admission is not None:
            self._admission.close()
        for one in (self._near, self._far):
            if one is not None:
                one.close()
        if self._socket_file is not None:
            self._socket_file.unlink(missing_ok=True)
        self._end_connections()
        with self._lock:
            if self._arena is not None:
                self._arena.close()
                self._arena = None
            self._arena_failed = True
        for way in self._ways.values():
            way.release()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _check_process(self) -> None:
        """Refuse to use, in a forked process, connections and counts that are the parent's."""
        if os.getpid() != self._process:
            raise PacelineError(FORKED)

    def _end_connections(self) -> None:
        for way in self._ways.values():
            way.end()
        incoming = list(self._incoming.values())
        for one in incoming:
            one.end()
        self._turns.close()
        self._readers.close(_PARTING_S)
        for one in incoming:
            if one.lock.acquire(timeout=_PARTING_S):
                one.close()
                one.lock.release()

    def _shared(self) -> Arena | None:
        """Return what large buffers to peers of this machine are written into."""
        with self._lock:
            if self._arena is None and not self._arena_failed:
                try:
                    self._arena = Arena()
                except OSError:
                    self._arena_failed = True
            return self._arena

    def _admit(
        self, connection: socket.socket, boot: bytes, far: bool, view: SharedView | None
    ) -> str | None:
        """Take messages from a connection, or return what is wrong with it."""
        way = self._senders.get(boot)
        if way is None:
            return "it names no worker of this run"
        if way.entry.sealed != far:
            return "it did not come the way that its sender's messages come"
        if way.name in self._incoming:
            return "its sender is connected already"
        seal = Seal(self._secret, boot, self.boot) if far else None
        incoming = Incoming(connection, way.name, boot, seal, view)
        self._incoming[way.name] = incoming
        self._readers.add(connection.fileno(), functools.partial(self._ready, incoming))
        return None

    def _ready(self, incoming: Incoming, others: bool) -> None:
        """Take what a peer says, and carry it out here where others wait for messages meanwhile."""
        if not incoming.lock.acquire(blocking=False):
            return  # whoever has it arms it
        if incoming.ended:
            incoming.lock.release()
            return
        try:
            going, jobs = self._take(incoming)
        except BaseException:  # no memory, say: nobody knows what of a message was read
            self.go_on(incoming, going=False)
            raise
        if not (going and jobs and others):
            self.go_on(incoming, going=going)
            self._hand_out(jobs)
            return

        def hand_on(left: list[Job]) -> None:
            self.go_on(incoming, going=True)
            self._hand_out(left)

        self._turns.run(Turn(jobs, hand_on))

    def _hand_out(self, jobs: list[Job]) -> None:
        """Have others carry requests out; what no thread can be started for is done here."""
        for job in jobs:
            try:
                self._submit(job)
            except RuntimeError:
                try:
                    job()
                except Exception:  # noqa: BLE001  (of one request: the others are to be done, too)
                    traceback.print_exc(file=sys.stderr)

    def step_aside(self) -> None:
        """Have others read what this thread would read next: it is going to wait."""
        self._turns.end_own()

    def silence(self, incoming: Incoming) -> None:
        """Have no thread woken for what a peer says."""
        self._readers.silence(incoming.connection.fileno())

    def take_for(self, incoming: Incoming) -> bool:
        """Take what a peer says next in a thread that waits for an answer; return whether more may come."""
        going, jobs = self._take(incoming)
        self._hand_out(jobs)
        return going

    def _take(self, incoming: Incoming) -> tuple[bool, list[Job]]:
        """Pass on the messages that are there; return whether more may come, and what is to be done about these."""
        jobs: list[Job] = []
        self._reading.now = True
        try:
            for found in incoming.messages:
                if found is None:
                    break
                try:
                    job = self._receive(incoming.name, *found)
                except Exception:  # noqa: BLE001  (one message costs at most itself)
                    traceback.print_exc(file=sys.stderr)
                else:
                    if job is not None:
                        jobs.append(job)
        except EndedError:
            return False, jobs
        except SealError as error:
            self._refuse(str(error))
            return False, jobs
        finally:
            self._reading.now = False
        return True, jobs

    def go_on(self, incoming: Incoming, *, going: bool) -> None:
        """Let others read, or close what is at its end: then the peer is lost."""
        descriptor = incoming.connection.fileno()
        if going:
            incoming.lock.release()
            self._readers.arm(descriptor)
        else:
            self._readers.remove(descriptor)
            incoming.close()
            incoming.lock.release()
            self._ways[incoming.name].report_apart()

    def _refuse(self, reason: str) -> None:
        """Write into the log that there are strangers: once, since they may send as many messages as they like."""
        if not self._refused:
            self._refused = True
            print(f"paceline: refused: {UNSEALED} ({reason})", file=sys.stderr)  # noqa: T201  (the worker's log)


class Reading:
    """A block in which one thread takes the messages of a peer, so that no other is woken for the answer it waits for."""

    def __init__(self, mailbox: Mailbox, incoming: Incoming | None) -> None:
        self._mailbox, self._incoming = mailbox, incoming
        self._going = True

    def __enter__(self) -> Reading:
        incoming = self._incoming
        if incoming is not None:
            if not incoming.lock.acquire(blocking=False):
                self._incoming = None
            elif incoming.ended:
                self._incoming = None
                incoming.lock.release()
            else:
                self._mailbox.silence(incoming)
        return self

    def until(self, done: Callable[[], bool]) -> None:
        """Take messages until something is done, if it is this thread that takes them."""
        if self._incoming is None:
            return
        while self._going and not done():
            self._incoming.wait()
            try:
                self._going = self._mailbox.take_for(self._incoming)
            except BaseException:  # a signal's: nobody knows what of a message was read
                self._going = False
                raise

    def __exit__(self, *_: object) -> None:
        if self._incoming is not None:
            self._mailbox.go_on(self._incoming, going=self._going)


def _run_apart(job: Job) -> None:
    threading.Thread(target=job, daemon=True, name="paceline-calls").start()


def _clear_away(address: str) -> None:
    """Remove what a process that was killed has left in the file system."""
    if address.startswith("ipc://"):
        path = Path(address.removeprefix("ipc://"))
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            if path.parent.name.startswith(_FOLDER):
                path.parent.rmdir()

"""One process's end of the messages between processes: an inbox, and a way to each peer that it has something to say to.

On one machine messages go through a socket file in a folder that nobody else may enter. Between machines they go over TCP:
whoever connects gives a password made of the secret, and every frame is sealed (`sealing.py`), so nothing depends on the
network. A peer whose connection breaks is reported at once. No torch.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.transport.sealing import (
    BOOT_BYTES,
    HEADER_BYTES,
    LARGEST_FRAME,
    TAG_BYTES,
    Seal,
    SealError,
    derived,
    header,
    read_header,
)

UNSEALED = "a message does not carry this run's secret"
_HANDSHAKE_MS = 3000
"""How long a connection may take to give the password; a stranger that says nothing is dropped then."""
_LARGEST = LARGEST_FRAME + HEADER_BYTES + TAG_BYTES
_NO_COPY = 1 << 16
"""From this size on a frame is sent from the memory it is in: below, a copy costs less than the bookkeeping."""
_BACKLOG = 1024
_FOLDER = "paceline-calls-"
_LONGEST_PATH = 100
"""A socket's path has 107 characters at most on Linux."""
_PARTING_S = 5.0
"""How long a thread of ours that is giving a message on may take to end."""
_USER = b"paceline"
_BROKEN = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_EVENTS = _BROKEN | zmq.Event.CONNECT_RETRIED | zmq.Event.MONITOR_STOPPED


@dataclass(frozen=True)
class Entry:
    """Where a process is found."""

    boot: bytes
    address: str

    @property
    def sealed(self) -> bool:
        """Whether what is sent there leaves the machine."""
        return self.address.startswith("tcp://")


class Received:
    """A frame that has arrived, and is opened by whoever reads it."""

    def __init__(self, frame: zmq.Frame, opened: Callable[[memoryview], bytes] | None) -> None:
        self._frame, self._opened = frame, opened
        self.size = len(frame.buffer) - (TAG_BYTES if opened is not None else 0)

    def content(self) -> memoryview | bytes:
        """Return what is in it, or raise SealError."""
        content = self._frame.buffer
        return content if self._opened is None else self._opened(content)


Receive = Callable[[str, memoryview, Sequence[Received]], None]


class _Peer:
    """A way to one process."""

    def __init__(self, name: str, entry: Entry, secret: bytes, boot: bytes) -> None:
        self.name, self.entry = name, entry
        self.lock = threading.Lock()
        self.push: zmq.Socket[bytes] | None = None
        self.gone = False
        self.there = True
        """Until its connection has broken, which is reported once."""
        self._boot, self._count = boot, 0
        self._out = Seal(secret, boot, entry.boot) if entry.sealed else None
        self.incoming = Seal(secret, entry.boot, boot) if entry.sealed else None

    def send(self, content: bytes, frames: Sequence[memoryview], *, copies: bool) -> None:
        """Send a message; the caller has the lock, which keeps messages in the order of their count."""
        if self.push is None:
            return
        self._count += 1
        head = header(self._boot, self._count, len(frames))
        seal, send = self._out, self.push.send
        if seal is not None:
            content = seal.close(head, 0, content)
        send(head + content, zmq.SNDMORE if frames else 0)
        last = len(frames)
        for place, frame in enumerate(frames, 1):
            sent = frame if seal is None else seal.close(head, place, frame)
            # What is sealed is a copy already.
            copy = len(sent) < _NO_COPY or (copies and seal is None)
            send(sent, zmq.SNDMORE if place < last else 0, copy=copy)


class Mailbox:
    """An inbox that listens from `bind` on, takes messages from `start` on, and ends with `close`."""

    def __init__(self, secret: bytes) -> None:
        self.boot = secrets.token_bytes(BOOT_BYTES)
        self._secret = secret
        self._context = zmq.Context()
        self._inbox = self._listening()
        self._far: zmq.Socket[bytes] | None = None
        """The inbox for other machines. What comes in there is sealed; what comes from this machine never goes that way."""
        self._peers: dict[str, _Peer] = {}
        self._senders: dict[bytes, _Peer] = {}
        self._folder: Path | None = None
        self._started = self._closing = False
        self._refused = False
        self._watched: list[tuple[_Peer, zmq.Socket[bytes]]] = []
        self._wake = self._context.socket(zmq.PAIR)
        self._woken = self._context.socket(zmq.PAIR)
        self._wake.bind("inproc://wake")
        self._woken.connect("inproc://wake")
        self._wake_lock = threading.Lock()

    def bind(self, folder: str | None, host: str | None) -> tuple[str, str]:
        """Listen in a folder of this machine and, where a host is given, on that address of it; returns both addresses.

        Without a folder one is made, and removed at the end.
        """
        if folder is None or len(folder) > _LONGEST_PATH - 32:
            near = tempfile.gettempdir()
            place = near if len(near) < _LONGEST_PATH // 2 else "/tmp"  # noqa: S108  (mkdtemp makes it safe)
            self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=place))
            folder = str(self._folder)
        local = f"ipc://{folder}/{self.boot.hex()[:12]}"
        self._inbox.bind(local)
        if host is None:
            return local, ""
        asked = self._context.socket(zmq.REP)
        asked.bind("inproc://zeromq.zap.01")
        self._start(lambda: self._admit(asked), "paceline-admission", asked)
        self._far = self._listening()
        self._far.plain_server = True
        self._far.zap_domain = b"paceline"
        self._far.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        port = self._far.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
        return local, f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def _listening(self) -> zmq.Socket[bytes]:
        inbox: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        inbox.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        inbox.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
        inbox.setsockopt(zmq.BACKLOG, _BACKLOG)
        inbox.setsockopt(zmq.RCVHWM, 0)
        return inbox

    def start(self, peers: dict[str, Entry], receive: Receive, lose: Callable[[str], None]) -> None:
        """Take messages of these peers, each given to `receive` with its sender's name; `lose` hears who is gone."""
        for name, entry in peers.items():
            self._peers[name] = self._senders[entry.boot] = _Peer(name, entry, self._secret, self.boot)
        self._started = True
        for inbox in (self._inbox, self._far):
            if inbox is not None:
                self._start(functools.partial(self._take, inbox, receive), "paceline-inbox", inbox)
        self._start(lambda: self._watch(lose), "paceline-connections", self._woken)

    def send(self, name: str, content: bytes, frames: Sequence[memoryview], *, copies: bool = True) -> bool:
        """Send a message, from any thread; False where the peer is gone. Without `copies` large frames are read later."""
        peer = self._peers[name]
        with peer.lock:
            if peer.push is None:
                if peer.gone or self._closing:
                    return False
                peer.push = self._connected(peer)
            peer.send(content, frames, copies=copies)
        return True

    def forget(self, name: str) -> None:
        """Send nothing more to a peer that is gone."""
        peer = self._peers[name]
        with peer.lock:
            peer.gone, push, peer.push = True, peer.push, None
            if push is not None:
                push.close(linger=0)
        _clear_away(peer.entry.address)

    def close(self, linger_s: float = 0.0) -> None:
        """End, when what was sent has left or so much time has passed."""
        self._closing = True
        for peer in self._peers.values():
            with peer.lock:
                peer.gone, push, peer.push = True, peer.push, None
                if push is not None:
                    push.close(linger=int(1000 * linger_s))
        with self._wake_lock:
            self._wake.close(linger=0)
        if not self._started:
            self._inbox.close(linger=0)
            if self._far is not None:
                self._far.close(linger=0)
            self._woken.close(linger=0)
        # Ends what waits in our threads, each of which closes its own sockets. Not in this thread: one of them may be giving
        # a message on to somebody who takes his time.
        ending = threading.Thread(target=self._context.term, daemon=True, name="paceline-parting")
        ending.start()
        ending.join(_PARTING_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, target: Callable[[], None], name: str, own: zmq.Socket[bytes]) -> None:
        """Run something on a thread that ends with the mailbox, and closes its socket then."""

        def run() -> None:
            try:
                target()
            except zmq.ContextTerminated:
                own.close(linger=0)

        threading.Thread(target=run, daemon=True, name=name).start()

    def _connected(self, peer: _Peer) -> zmq.Socket[bytes]:
        push: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        push.setsockopt(zmq.SNDHWM, 0)
        push.setsockopt(zmq.LINGER, 0)
        if peer.entry.sealed:
            push.plain_username, push.plain_password = _USER, _password(self._secret)
            push.setsockopt(zmq.IPV6, 1 if "[" in peer.entry.address else 0)
        monitor = push.get_monitor_socket(_EVENTS)
        push.connect(peer.entry.address)
        with self._wake_lock:
            self._watched.append((peer, monitor))
            if not self._closing:
                self._wake.send(b"")
        return push

    def _take(self, inbox: zmq.Socket[bytes], receive: Receive) -> None:
        """Read the first frame of every message, and give it on."""
        recv, senders, far = inbox.recv, self._senders, inbox is self._far
        while True:
            frames = [recv(copy=False)]
            while frames[-1].more:
                frames.append(recv(copy=False))
            try:
                first = frames[0].buffer
                boot, count, number = read_header(first)
                peer = senders.get(boot)
                if peer is None or number != len(frames) - 1:
                    raise SealError("it names no worker of this run")
                if peer.entry.sealed != far:
                    raise SealError("it did not come the way that its sender's messages come")
                seal, content = peer.incoming, first[HEADER_BYTES:]
                if seal is None:
                    rest = [Received(one, None) for one in frames[1:]]
                else:
                    head = bytes(first[:HEADER_BYTES])
                    content = memoryview(seal.open(head, 0, content))
                    seal.check(count)  # only now is it known to be the sender's own
                    rest = [
                        Received(one, functools.partial(seal.open, head, place))
                        for place, one in enumerate(frames[1:], 1)
                    ]
            except SealError as error:
                self._refuse(error)
                continue
            try:
                receive(peer.name, content, rest)
            except Exception:  # noqa: BLE001  (one message costs at most itself: all others come through this thread)
                traceback.print_exc(file=sys.stderr)

    def _refuse(self, error: SealError) -> None:
        """Write into the log that there are strangers: once, since they may send as many messages as they like."""
        if not self._refused:
            self._refused = True
            print(f"paceline: refused: {UNSEALED} ({error})", file=sys.stderr)  # noqa: T201  (the worker's log)

    def _admit(self, asked: zmq.Socket[bytes]) -> None:
        """Answer the library's question whether a connection gave the right password."""
        while True:
            version, request, _, _, _, mechanism, *given = asked.recv_multipart()
            right = mechanism == b"PLAIN" and given == [_USER, _password(self._secret)]
            if not right:
                self._refuse(SealError("a connection gave another password"))
            asked.send_multipart([version, request, *((b"200", b"OK") if right else (b"400", b"")), b"", b""])

    def _watch(self, lose: Callable[[str], None]) -> None:
        """Report each peer whose connection breaks, and one that refuses to be connected to."""
        try:
            self._follow(lose)
        finally:
            for _, monitor in self._watched:
                monitor.close(linger=0)

    def _follow(self, lose: Callable[[str], None]) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._woken in ready:
                self._woken.recv()
            with self._wake_lock:
                watched = list(self._watched)
            for peer, monitor in watched:
                if monitor not in ready:
                    poller.register(monitor, zmq.POLLIN)
                    continue
                event = recv_monitor_message(monitor)["event"]
                if event == zmq.Event.MONITOR_STOPPED:
                    self._unwatch(poller, peer, monitor)
                elif peer.there and not self._closing and (event & _BROKEN or _refuses(peer.entry.address)):
                    peer.there = False
                    try:
                        lose(peer.name)
                    except Exception:  # noqa: BLE001  (what is done about one must not hide the loss of the next)
                        traceback.print_exc(file=sys.stderr)

    def _unwatch(self, poller: zmq.Poller, peer: _Peer, monitor: zmq.Socket[bytes]) -> None:
        poller.unregister(monitor)
        with self._wake_lock:
            self._watched.remove((peer, monitor))
        monitor.close(linger=0)


def _clear_away(address: str) -> None:
    """Remove what a process that was killed has left in the file system."""
    if address.startswith("ipc://"):
        path = Path(address.removeprefix("ipc://"))
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            if path.parent.name.startswith(_FOLDER):
                path.parent.rmdir()


def _password(secret: bytes) -> bytes:
    return derived(secret, b"password").hex().encode()


def _refuses(address: str) -> bool:
    """Return whether nobody listens at an address any more; one that is only busy, or far away, does not refuse."""
    try:
        if address.startswith("ipc://"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.setblocking(False)
                probe.connect(address.removeprefix("ipc://"))
        else:
            found = urlsplit(address)
            socket.create_connection((str(found.hostname), int(found.port or 0)), timeout=1.0).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        time.sleep(0.01)
    return False

"""The launcher's handle on the fork server: start it, ask it for workers, hear how they end."""

from __future__ import annotations

import atexit
import errno
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

from paceline.errors import PacelineError
from paceline.launch.workers.fork_messages import MAX_MESSAGE
from paceline.training import task_folder
from paceline.world import env

_FULL = (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS)
"""Why the kernel takes no message more: so many lie unread, or so many descriptors are on their way."""
_shared: ForkServer | None = None
_shared_lock = threading.Lock()


class ForkServer:
    """A process that forks workers which have torch loaded already.

    What is sent to it never waits for it: above a few hundred messages both would wait for each other. The rest is kept here
    and goes out as it reads on.
    """

    def __init__(self) -> None:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = _start(theirs.fileno())
        except OSError as error:
            raise PacelineError(
                f"the fork server cannot be started: {error.strerror}. This machine, container or user has no processes, open "
                "files or memory to spare."
            ) from error
        self._channel = ours
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._tickets = 0
        self._owner = os.getpid()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when `reports` has something."""
        return self._channel.fileno()

    def request(self, job: object, descriptors: Sequence[int], modules: Sequence[str] = ()) -> int:
        """Ask for a worker that runs `job`; `descriptors` are handed to it. Gives a ticket; the report follows.

        `modules` are imported before it is forked, once for it and all that come after.
        """
        self._tickets += 1
        payload = os.memfd_create("paceline-job")
        try:
            with os.fdopen(os.dup(payload), "wb") as file:
                pickle.dump(job, file)
            request = {"do": "spawn", "ticket": self._tickets, "modules": [*modules]}
            if not self._send(request, [payload, *descriptors]):
                raise self._gone()
        finally:
            os.close(payload)
        return self._tickets

    def load(self, modules: Sequence[str]) -> None:
        """Import modules in the fork server now, once for all future workers."""
        self._send({"do": "load", "modules": [*modules]})  # the next request says where it is gone

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a worker; one that has ended already is left alone."""
        self._send({"do": "signal", "pid": pid, "signal": int(number)})

    def report(self) -> dict[str, Any]:
        """Wait for the next report: a worker that started, ended, or cannot be started."""
        while (report := self.await_report()) is None:
            pass
        return report

    def await_report(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Wait for the next report, so many seconds at most; None where there was none."""
        until = None if seconds is None else time.monotonic() + seconds
        while (report := self.poll()) is None:
            left = None if until is None else max(0.0, 1000 * (until - time.monotonic()))
            if left == 0.0:
                return None
            ready = select.poll()
            ready.register(self._channel, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            ready.poll(left)
        return report

    def poll(self) -> dict[str, Any] | None:
        """Send what can be sent now, and return the next report; None where there is none yet."""
        self._send_on()
        try:
            message = self._channel.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            message = b""  # it died with requests unread
        if not message:
            raise self._gone()
        report: dict[str, Any] = json.loads(message)
        return report

    @property
    def backlog(self) -> bool:
        """Whether something is yet to be sent: `poll` goes on with it once the descriptor is writable."""
        return bool(self._unsent)

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """Send a message, or keep it until there is room; return False where the fork server is gone."""
        # Copies: the caller closes its own as soon as this returns.
        self._unsent.append((json.dumps(message).encode(), [os.dup(one) for one in descriptors]))
        return self._send_on()

    def _send_on(self) -> bool:
        try:
            while self._unsent:
                message, descriptors = self._unsent[0]
                beside = (
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
                )
                # Not socket.send_fds: it drops the flags that it is given (Python 3.11 to 3.13).
                self._channel.sendmsg([message], beside, socket.MSG_DONTWAIT)
                self._drop_first()
        except (BrokenPipeError, ConnectionResetError):
            self._drop_unsent()
            return False
        except OSError as error:
            if error.errno not in _FULL:
                raise
        return True

    def _drop_first(self) -> None:
        for descriptor in self._unsent.popleft()[1]:
            os.close(descriptor)

    def _drop_unsent(self) -> None:
        while self._unsent:
            self._drop_first()

    def alive(self) -> bool:
        """Return whether this process started it and it still runs."""
        return self._owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """End it, and with it every worker."""
        if self._owner != os.getpid():
            return
        self._drop_unsent()
        self._channel.close()
        if self._tickets == 0:
            self.kill()  # it has no workers to end, and may be busy loading torch
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once; the kernel ends its workers."""
        self._process.kill()
        self._process.wait()

    def _gone(self) -> PacelineError:
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return PacelineError(f"the fork server (pid {self._process.pid}) {how}, and with it every worker.")


def _start(channel: int) -> subprocess.Popen[bytes]:
    """Start the process, with its end of the channel."""
    return subprocess.Popen(
        [
            sys.executable,
            "-P",  # a numpy.py in the current folder is nobody's numpy; a job brings the search path of the user's own code
            "-m",
            "paceline.launch.workers.fork_server_process",
            str(channel),
            str(os.getpid()),
        ],
        pass_fds=[channel],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # out of reach of the terminal's Ctrl-C
    )


def shared() -> ForkServer:
    """Return this process's fork server, started on first use and kept warm until the process ends."""
    global _shared  # noqa: PLW0603  (one a process, like the import of torch that it saves)
    with _shared_lock:
        if _shared is None or not _shared.alive():
            _shared = ForkServer()
            atexit.register(_shared.close)
        return _shared


def search_path() -> list[str]:
    """Return where modules are looked for, with the empty entry spelled out, for a worker that may start elsewhere."""
    return [entry or env.working_folder() for entry in task_folder.search_path()]

"""The launcher's handle on the fork server: start it, ask it for workers, hear how they end."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.launch.workers.fork_messages import MAX_MESSAGE

_shared: ForkServer | None = None
_shared_lock = threading.Lock()


class ForkServer:
    """A process that forks workers which have torch loaded already."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "paceline.launch.workers.fork_server_process",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # out of reach of the terminal's Ctrl-C
            )
        self._channel = ours
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
            message = json.dumps({"do": "spawn", "ticket": self._tickets, "modules": [*modules]}).encode()
            socket.send_fds(self._channel, [message], [payload, *descriptors])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._gone() from error
        finally:
            os.close(payload)
        return self._tickets

    def load(self, modules: Sequence[str]) -> None:
        """Import modules in the fork server now, once for all future workers."""
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the next request says that it is gone
            self._channel.send(json.dumps({"do": "load", "modules": [*modules]}).encode())

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a worker; one that has ended already is left alone."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(json.dumps({"do": "signal", "pid": pid, "signal": int(number)}).encode())

    def await_report(self, seconds: float) -> bool:
        """Wait for a report, so many seconds at most; return whether there is one."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def report(self) -> dict[str, Any]:
        """Return the next report: a worker that started or ended."""
        try:
            message = self._channel.recv(MAX_MESSAGE)
        except ConnectionResetError:
            message = b""  # it died with requests unread
        if not message:
            raise self._gone()
        report: dict[str, Any] = json.loads(message)
        return report

    def alive(self) -> bool:
        """Return whether this process started it and it still runs."""
        return self._owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """End it, and with it every worker."""
        if self._owner != os.getpid():
            return
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


def shared() -> ForkServer:
    """Return this process's fork server, started on first use and kept warm until the process ends."""
    global _shared  # noqa: PLW0603  (one a process, like the import of torch that it saves)
    with _shared_lock:
        if _shared is None or not _shared.alive():
            _shared = ForkServer()
            atexit.register(_shared.close)
        return _shared


def search_path() -> list[str]:
    """Return `sys.path` with the empty entry spelled out, for a worker that may start elsewhere."""
    return [entry or str(Path.cwd()) for entry in sys.path]

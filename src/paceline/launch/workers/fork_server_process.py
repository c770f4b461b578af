"""The fork server: a process that has imported torch once and forks workers from itself in milliseconds.

Run as `python -m paceline.launch.workers.fork_server_process FD LAUNCHER_PID`. It reads requests from the socket FD, forks,
and reports how each worker ended. It owns nothing else: no thread is ever started here and CUDA is never touched, so
forking is safe. When the launcher goes away, in whatever manner, every worker is killed: its process is watched, since
copies that it forked of itself would keep the socket open. When this process goes away, the kernel kills its workers (they
asked for that).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from paceline.compat.parent_death import die_with_parent, outlive_parent
from paceline.compat.python import forget_finalizers
from paceline.launch.workers.fork_messages import MAX_DESCRIPTORS, MAX_MESSAGE
from paceline.world import standard_streams

FORK_TRIES = 20
FORK_PAUSE_S = 0.5
"""How often, and after which pause, a worker is tried to be forked where processes or memory are short."""
_loaded: set[str] = set()


def main() -> None:
    """Serve until the launcher closes its end of the socket, or is gone."""
    standard_streams.fill()
    channel = socket.socket(fileno=int(sys.argv[1]))
    # The terminal's Ctrl-C is for the launcher; it decides what becomes of the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # So are those that a batch system sends to all processes of a job. Workers take SIGTERM as they are told to.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    # Loading takes seconds in which nobody listens. Not for good: the kernel counts the launcher as dead when only the thread
    # that started us has ended.
    die_with_parent(int(sys.argv[2]))
    launcher = _open_process(int(sys.argv[2]))
    _preload()
    outlive_parent()
    server = _Server(channel, launcher, [channel, wake_read, wake_write])
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        if launcher is not None:
            selector.register(launcher, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(FORK_PAUSE_S if server.delayed else None):
                if key.fileobj is wake_read:
                    with contextlib.suppress(BlockingIOError):
                        wake_read.recv(MAX_MESSAGE)
                    server.reap()
                elif not server.serve():
                    server.kill()
                    signal.set_wakeup_fd(-1)  # their ends have nobody left to be told to
                    return
            server.try_again()


def _open_process(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process ends; None where the kernel has none to give."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _preload() -> None:
    import numpy as np  # noqa: F401
    import torch  # noqa: F401
    import torch.distributed as _dist  # noqa: F401

    from paceline.compat import dynamo
    from paceline.launch.workers import read_shards as _read_shards  # noqa: F401
    from paceline.launch.workers import worker as _worker  # noqa: F401
    from paceline.training.description import package_sha256

    dynamo.install()
    package_sha256()  # the workers' copies of this process have it
    # Objects made so far will not be freed in any worker: keep the collector from dirtying their shared pages.
    gc.collect()
    gc.freeze()


def _load(modules: list[str]) -> None:
    """Import once, here, what every worker to come would import by itself; one that fails does so there, and says why."""
    missing = [name for name in modules if name not in _loaded]
    for name in missing:
        _loaded.add(name)
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if missing:
        gc.collect()
        gc.freeze()


@dataclass
class _Delayed:
    """A worker that could not be forked, and is tried again."""

    ticket: int
    descriptors: list[int]
    due: float
    tries: int = 1


@dataclass
class _Server:
    """The workers that were forked, and those that are yet to be."""

    channel: socket.socket
    launcher: int | None
    """Becomes readable when the launcher has ended."""
    private: list[socket.socket]
    """What no worker is to have."""
    children: set[int] = field(default_factory=set)
    delayed: list[_Delayed] = field(default_factory=list)

    def serve(self) -> bool:
        """Carry out one request; False when the launcher is gone."""
        if self._is_alone():
            return False
        message, descriptors, flags, _ = socket.recv_fds(self.channel, MAX_MESSAGE, MAX_DESCRIPTORS)
        if not message or self._is_alone():
            return False
        request = json.loads(message)
        if request["do"] == "spawn":
            if flags & socket.MSG_CTRUNC:  # some were dropped: this process may open no more
                self._give_up(request["ticket"], descriptors, errno.EMFILE)
                return True
            _load(request["modules"])
            if self._is_alone():  # loading takes seconds
                return False
            self._fork(_Delayed(request["ticket"], descriptors, due=0.0, tries=0))
        elif request["do"] == "load":
            _load(request["modules"])
        elif request["pid"] in self.children:
            os.kill(request["pid"], request["signal"])
        return True

    def try_again(self) -> None:
        """Fork the workers for whom there was no room, if there is now."""
        now, waiting, self.delayed = time.monotonic(), self.delayed, []
        for one in waiting:
            self._fork(one) if one.due <= now else self.delayed.append(one)

    def _fork(self, wanted: _Delayed) -> None:
        """Fork a worker, or try again later: what the machine lacks may come back, and the other workers do not need it."""
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._delay(wanted, error.errno or errno.EAGAIN)
            return
        if pid == 0:
            others = [descriptor for one in self.delayed for descriptor in one.descriptors]
            _become_worker(parent, self.private, others, wanted.descriptors)
        self.children.add(pid)
        _close(wanted.descriptors)
        self._tell({"started": wanted.ticket, "pid": pid})

    def _delay(self, wanted: _Delayed, number: int) -> None:
        wanted.tries += 1
        if wanted.tries > FORK_TRIES:
            self._give_up(wanted.ticket, wanted.descriptors, number)
            return
        if wanted.tries == 1:
            self._tell({"delayed": wanted.ticket, "errno": number})
        wanted.due = time.monotonic() + FORK_PAUSE_S
        self.delayed.append(wanted)

    def _give_up(self, ticket: int, descriptors: list[int], number: int) -> None:
        _close(descriptors)
        self._tell({"failed": ticket, "errno": number})

    def reap(self) -> None:
        """Report every worker that has ended."""
        while self.children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.children.discard(pid)
            self._tell({"ended": pid, "status": os.waitstatus_to_exitcode(status)})

    def kill(self) -> None:
        """End every worker."""
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_alone(self) -> bool:
        """Return whether the launcher is gone, whatever it still asked for: that lies in the socket before its end."""
        poll = select.poll()
        poll.register(self.channel, 0)  # what nobody need ask for: that the other end is closed
        if self.launcher is not None:
            poll.register(self.launcher, select.POLLIN)
        return bool(poll.poll(0))

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send(json.dumps(message).encode())


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _become_worker(
    parent: int, private: list[socket.socket], others: list[int], descriptors: list[int]
) -> NoReturn:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in private:
            end.close()
        _close(others)
        # What the fork server holds is not this worker's to take apart: for torch's operators it would take 60 ms at its end.
        forget_finalizers()
        from paceline.launch.workers import worker

        status = worker.run(parent, *descriptors)
    finally:
        # Not sys.exit: the fork server's own stack lies below us and must not unwind in a worker.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()

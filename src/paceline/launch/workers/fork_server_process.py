"""The fork server: a process that has imported torch once and forks workers from itself in milliseconds.

Run as `python -m paceline.launch.workers.fork_server_process FD LAUNCHER_PID`. It reads requests from the socket FD, forks,
and reports how each worker ended. It owns nothing else: no thread is ever started here and CUDA is never touched, so
forking is safe. When the launcher goes away, in whatever manner, the socket closes and every worker is killed; when this
process goes away, the kernel kills its workers (they asked for that).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import sys
from typing import Any, NoReturn

from paceline.compat.parent_death import die_with_parent, outlive_parent
from paceline.compat.python import forget_finalizers
from paceline.launch.workers.fork_messages import MAX_DESCRIPTORS, MAX_MESSAGE

_loaded: set[str] = set()


def main() -> None:
    """Serve until the launcher closes its end of the socket."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    # The terminal's Ctrl-C is for the launcher; it decides what becomes of the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    # Loading takes seconds in which nobody listens to the socket. Afterwards its end says the same, and says it
    # better: the kernel counts the launcher as dead when only the thread that started us has ended.
    die_with_parent(int(sys.argv[2]))
    _preload()
    outlive_parent()

    children: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is wake_read:
                    with contextlib.suppress(BlockingIOError):
                        wake_read.recv(MAX_MESSAGE)
                    _reap(channel, children)
                elif not _serve(channel, children, [channel, wake_read, wake_write]):
                    _kill(children)
                    signal.set_wakeup_fd(-1)  # their ends have nobody left to be told to
                    return


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
    """Import once, here, what every worker to come would import by itself."""
    missing = [name for name in modules if name not in _loaded]
    for name in missing:
        importlib.import_module(name)
        _loaded.add(name)
    if missing:
        gc.collect()
        gc.freeze()


def _serve(channel: socket.socket, children: set[int], private: list[socket.socket]) -> bool:
    """Carry out one request; False when the launcher is gone."""
    message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE, MAX_DESCRIPTORS)
    if not message or _is_closed(channel):
        return False
    request = json.loads(message)
    if request["do"] == "spawn":
        _load(request["modules"])
        if _is_closed(channel):  # loading takes seconds
            return False
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_worker(parent, private, descriptors)
        children.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        _tell(channel, {"started": request["ticket"], "pid": pid})
    elif request["do"] == "load":
        _load(request["modules"])
    elif request["pid"] in children:
        os.kill(request["pid"], request["signal"])
    return True


def _is_closed(channel: socket.socket) -> bool:
    """Return whether the launcher is gone, whatever it still asked for: that lies in the socket before its end."""
    poll = select.poll()
    poll.register(channel, 0)  # what nobody need ask for: that the other end is closed
    return bool(poll.poll(0))


def _become_worker(parent: int, private: list[socket.socket], descriptors: list[int]) -> NoReturn:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in private:
            end.close()
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


def _reap(channel: socket.socket, children: set[int]) -> None:
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        children.discard(pid)
        _tell(channel, {"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def _tell(channel: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.send(json.dumps(message).encode())


def _kill(children: set[int]) -> None:
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()

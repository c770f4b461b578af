"""A process that has loaded torch and forks the commands of the pages from itself, instead of starting each anew.

Most of the time of the pages went into loading torch, once for a command and once more for its fork server. Here a
command begins as a copy of a process that has loaded what they all load and has done nothing else: in its own folder,
with its own output, `__main__` and fork server (a copy as well).

Run as `python warm.py FD ...`: each socket FD is served by a process of its own, one command at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from paceline.compat.parent_death import die_with_parent
from paceline.strategies import STRATEGIES

LOADED = (
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "paceline.cli.application",
    "paceline.launch.workers.fork_server",
    "paceline.launch.workers.worker",
    "paceline.training.trainer",
    # Torch's compiler and DTensor too, 3 s for each command that cuts a model: what does without them is tested elsewhere.
    *dict.fromkeys(name for entry in STRATEGIES.values() for name in entry.imports),
)
FORK_SERVER = ["-m", "paceline.launch.workers.fork_server_process"]
MESSAGE = 65_536
READY = b"ready"


class Warm:
    """Runs one Python file at a time, in a copy of the process that has everything loaded."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def run(self, words: Sequence[str], folder: Path, limit_s: float) -> tuple[int, str]:
        """Run `FILE ARGUMENT ...` in a folder; give the status and what it printed on both streams."""
        self._channel.settimeout(limit_s)
        with tempfile.TemporaryFile() as output:
            message = json.dumps({"words": [*words], "folder": str(folder)}).encode()
            socket.send_fds(self._channel, [message], [output.fileno()])
            status = self._channel.recv(MESSAGE)
            output.seek(0)
            return int(status), output.read().decode()


@contextlib.contextmanager
def started(number: int, environment: Mapping[str, str]) -> Iterator[list[Warm]]:
    """Load everything once, for as many commands at a time, and end whatever is still running afterwards."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(number)]
    theirs = [end.fileno() for _, end in pairs]
    command = [sys.executable, __file__, *map(str, theirs)]
    process = subprocess.Popen(command, env=environment, pass_fds=theirs, stdin=subprocess.DEVNULL)
    for _, end in pairs:
        end.close()
    try:
        for end, _ in pairs:
            assert end.recv(MESSAGE) == READY
        yield [Warm(end) for end, _ in pairs]
    finally:
        for end, _ in pairs:
            end.close()
        process.kill()  # what it has forked asked the kernel to end with it
        process.wait()


class _Popen(subprocess.Popen[Any]):
    """Starts a process as ever, but for the first fork server: that one stands by already."""

    stand_by: tuple[int, socket.socket] | None = None

    def _execute_child(self, args: Any, *details: Any) -> None:
        if self.stand_by is None or args[1:3] != FORK_SERVER:
            super()._execute_child(args, *details)  # type: ignore[misc]
            return
        self.pid, channel = self.stand_by
        self._child_created = True
        _Popen.stand_by = None
        socket.send_fds(channel, [args[4].encode()], [int(args[3])])
        channel.close()


def main() -> None:
    """Load everything, serve, and in a copy made for a command be that command."""
    die_with_parent()
    for name in LOADED:
        importlib.import_module(name)
    from paceline.training.description import package_sha256

    package_sha256()
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        finalizer.atexit = False  # of torch's operators: not for each copy to take apart
    gc.collect()
    gc.freeze()
    ends = [int(word) for word in sys.argv[1:]]
    own = os.getpid()
    for end in ends:
        if os.fork() == 0:
            die_with_parent(own)
            _serve(socket.socket(fileno=end))
            os._exit(0)
        os.close(end)
    for _ in ends:
        os.wait()


def _serve(channel: socket.socket) -> None:
    """Fork for each request, and report how that ended."""
    own = os.getpid()
    channel.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE, 1)
        if not message:
            return
        command = os.fork()
        if command == 0:
            channel.close()
            die_with_parent(own)
            _be(**json.loads(message), output=descriptors[0])
        os.close(descriptors[0])
        _, status = os.waitpid(command, 0)
        channel.send(str(os.waitstatus_to_exitcode(status)).encode())


def _be(words: list[str], folder: str, output: int) -> NoReturn:
    """Run the file as `__main__` and end, as the interpreter does."""
    for target in (1, 2):
        os.dup2(output, target)
    os.close(output)
    os.chdir(folder)
    _keep_fork_server()
    path = Path(words[0]).absolute()
    sys.argv, sys.path[0] = words, str(path.parent)
    module = ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    status = 1
    try:
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)  # noqa: S102
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
    finally:
        _end(status)


def _end(status: int) -> NoReturn:
    """Do what the interpreter does at its end, but for taking a thousand modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _keep_fork_server() -> None:
    """Fork a process that waits to become the fork server of this one, should it want any."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        _Popen.stand_by = (pid, ours)
        subprocess.Popen = _Popen  # type: ignore[misc]
        return
    ours.close()
    launcher, descriptors, _, _ = socket.recv_fds(theirs, MESSAGE, 1)
    if launcher:
        os.setsid()
        sys.argv, sys.path[0] = ["zygote", str(descriptors[0]), launcher.decode()], str(Path.cwd())
        importlib.import_module("paceline.launch.workers.fork_server_process").main()
    os._exit(0)


if __name__ == "__main__":
    main()

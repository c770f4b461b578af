"""Starts a command and keeps count of every process that comes of it, also of those that lost their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.patience import HANG_S, Stopwatch

MARK = "PACELINE_TEST_MARK"
PACELINE = (sys.executable, "-m", "paceline")


def run_python(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, and return how it ended."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        **options,
    )


class Started:
    """A command in progress. All it starts inherits a mark in its environment, by which /proc gives it away."""

    def __init__(self, command: tuple[str, ...], folder: Path) -> None:
        self.mark = f"{MARK}={uuid.uuid4().hex}".encode()
        name, value = self.mark.decode().split("=")
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # As in a job that a shell has put into the background: the command would inherit it, and not hear Ctrl-C.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def left(self) -> dict[int, str]:
        """Give every process that still runs, the command itself included."""
        return {int(path.name): _read(path / "cmdline") for path in _processes() if self._is_ours(path)}

    def forked(self) -> dict[int, str]:
        """Give the fork server and all that came from it."""
        return {pid: command for pid, command in self.left().items() if "fork_server_process" in command}

    def fork_server(self) -> int:
        """Give the fork server itself: the one child of the command."""
        return next(pid for pid in self.forked() if parent(pid) == self.process.pid)

    def wait_until(self, condition: Callable[[], object], seconds: float = HANG_S) -> float:
        """Wait for a condition and give how long it took."""
        watch = Stopwatch()
        while not condition():
            assert watch.seconds() < seconds, f"not after {seconds} s; still there: {self.left()}"
            time.sleep(0.02)
        return watch.seconds()

    def interrupt(self) -> None:
        """Press Ctrl-C: a terminal sends it to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        """Wait for the end: status, standard output, standard error."""
        out, err = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, out, err

    def _is_ours(self, path: Path) -> bool:
        return self.mark in _read(path / "environ").encode() and _state(path) not in "ZX"


@contextmanager
def started(*command: str, folder: Path) -> Iterator[Started]:
    """Start a command in a folder; whatever is left of it afterwards is killed."""
    one = Started(command, folder)
    try:
        yield one
    finally:
        for pid in [one.process.pid, *one.left()]:
            if one.process.returncode is None or pid != one.process.pid:
                _kill(pid)
        one.process.wait()
        one.process.stdout.close()
        one.process.stderr.close()


def parent(pid: int) -> int:
    """Give a process's parent."""
    return int(_read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1])


def _processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _state(path: Path) -> str:
    return (_read(path / "stat").rpartition(")")[2].split() or ["X"])[0]


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

"""What a launcher elsewhere is told, and what comes back of it, over ssh or through an actor of Ray's. Imports no torch.

The first line of its standard input holds variables, the run's secret among them, which is thus in no command line. The input
stays open: each later line is the number of a signal, and its end is the end of whoever started the launcher. The other end is
`paceline.cli.remote_end`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.launch.clusters.commands import without
from paceline.training.options import RunOptions
from paceline.transport.secret import Secret
from paceline.world import env
from paceline.world.run_secret import run_secret

MODULE = "paceline.cli.remote_end"
HERE = b"paceline is here"
"""The line by which the other end says that the command runs there; what a shell prints before it is none of ours."""
_PASSED_ON = ("GLOO_", "NCCL_", "OMP_", "TORCH_")
"""What variables begin with that the other end gets: they decide how tensors travel, and with how many threads."""
_DECIDED = ("--on", "--hosts", "--ssh", "--resources", "--nodes", "--rendezvous", "--secret-file", "--out")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def arguments(given: Sequence[str], options: RunOptions, meeting: str | None, *, lead: bool) -> list[str]:
    """Return the command line for a launcher elsewhere: what is decided here counts there, against a --config file, too."""
    end = given.index("--") if "--" in given else len(given)
    decided = [f"--nodes={options.nodes}"]
    decided += [] if meeting is None else [f"--rendezvous={meeting}"]
    decided += [] if options.out is None else [f"--out={options.out}"]
    decided += [] if options.secret_file is None else ["--secret-file="]  # it is in the variables
    decided += ["--lead"] if lead else ["--no-lead"] if options.lead else []
    return [*without(given[:end], *_DECIDED), *decided, *given[end:]]


def variables(options: RunOptions, *more: str) -> dict[str, str]:
    """Return what the other end gets: the secret of the run, and variables that begin in certain ways, or with one of `more`."""
    secret = Secret.read(Path(options.secret_file)) if options.secret_file else run_secret()
    found = {name: value for name, value in env.snapshot().items() if name.startswith((*_PASSED_ON, *more))}
    return {**found, env.SECRET: (secret or Secret.make()).text}


def start(words: Sequence[str], told: Mapping[str, str], **how: Any) -> subprocess.Popen[bytes]:
    """Start a command that leads to the other end, and tell it these variables. Its pipes have no buffers here."""
    process: subprocess.Popen[bytes] = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, **how
    )
    send(process, json.dumps(told))
    return process


def send(process: subprocess.Popen[bytes], line: str) -> None:
    """Write a line to the other end; one that is gone is noticed elsewhere."""
    rest = f"{line}\n".encode()
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[process.stdin.write(rest) :]


def status(process: subprocess.Popen[bytes]) -> int:
    """Wait for a command to end, and return its exit status as a shell has it."""
    code = process.wait()
    return 128 - code if code < 0 else code


def show(target: Any, chunk: bytes) -> None:
    """Write what the other end has said to standard output or standard error."""
    target.flush()
    target.buffer.write(chunk)
    target.flush()


@contextlib.contextmanager
def signals_go_to(pass_on: Callable[[int], object]) -> Iterator[None]:
    """Have signals passed on for a while; the third one that asks for the end leaves at once."""
    asked = 0

    def handle(number: int, _: Any) -> None:
        nonlocal asked
        asked += number != signal.SIGUSR1
        if asked > 2:
            raise KeyboardInterrupt
        pass_on(int(number))

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)

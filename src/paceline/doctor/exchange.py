"""Tries every backend that can be used here with a real all-reduce between real workers. Imports no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.doctor.devices import ReduceAlone
from paceline.doctor.finding import Finding, Level, fail, ok, warn
from paceline.errors import PacelineError
from paceline.launch import api
from paceline.launch.clusters import mpiexec
from paceline.launch.console import Console
from paceline.launch.local import LocalLauncher
from paceline.observe.formats import milliseconds
from paceline.training.options import BACKENDS, RunOptions

CHECK = "all-reduce"
WORKERS = 2
HANG_S = 20.0
"""Behind this a trial that makes no progress is given up."""
MPI_S = 60.0
GRACE_S = 5.0
"""How long mpiexec has to end its ranks."""


class Quiet(Console):
    """Shows nothing of what the workers of a trial write."""

    def output(self, stream: str, chunk: bytes) -> None:
        """Drop it."""

    def line(self, text: str) -> None:
        """Drop it."""


def backends(seen: Mapping[str, Any], only: str | None = None) -> list[Finding]:
    """Try the backends that paceline knows, or one of them, by what torch was seen to have."""
    found: list[Finding] = []
    for name in (one for one in BACKENDS if one != "auto" and only in (None, one)):
        why = _absent(name, seen)
        # A run needs gloo for what it says on the host, and NCCL where each worker has a GPU of its own.
        needed = only is not None or name == "gloo" or (name == "nccl" and len(seen["devices"]) > 1)
        if why is None:
            found += _try(name, seen, needed=needed)
        elif needed:
            found.append(
                fail("backends", f"{name}: {why}", "Use another --backend, or install what is missing.")
            )
        else:
            found.append(ok("backends", f"{name}: not tried, as {why}"))
    return found


def _absent(name: str, seen: Mapping[str, Any]) -> str | None:
    """Return why a backend cannot be tried; None where it can."""
    if name == "mpi":
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed (the extra mpi)"
        return None if mpiexec.program() else "there is no mpiexec"
    if not seen["backends"].get(name):
        return "torch was built without it"
    return "torch sees no GPU" if name == "nccl" and not seen["devices"] else None


def _try(name: str, seen: Mapping[str, Any], *, needed: bool) -> list[Finding]:
    try:
        if name == "mpi":
            return _under_mpiexec(needed=needed)
        if name == "nccl" and len(seen["devices"]) == 1:
            _alone(name)
            return [ok(CHECK, "nccl: a group of one on the one GPU works; between GPUs it cannot be tried")]
        timings = _between_workers(name, "cuda" if name == "nccl" else "cpu", WORKERS)
    except (PacelineError, OSError, subprocess.SubprocessError) as error:
        return [_broken(name, str(error), needed=needed)]
    return [measured(name, f"{WORKERS} workers of this machine", timings)]


def measured(backend: str, where: str, timings: Sequence[Mapping[str, Any]]) -> Finding:
    """Return what a trial has measured."""
    parts = ", ".join(
        f"{_size(one['bytes'])} {milliseconds(one['seconds'] * 1000)}{_bandwidth(one)}" for one in timings
    )
    return ok(CHECK, f"{backend}, {where}: {parts}", backend=backend, timings=list(timings))


def _bandwidth(one: Mapping[str, Any]) -> str:
    """Return the bus bandwidth, where a tensor is large enough to show it."""
    return f" ({one['bus_bytes_per_s'] / 1e9:.2f} GB/s)" if one["bytes"] >= 1 << 20 else ""


def _size(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def _broken(name: str, why: str, *, needed: bool) -> Finding:
    level = fail if needed else warn
    what = f"{name}: an all-reduce between workers of this machine fails: {' '.join(why.split())}"
    hint = (
        "See what else is said of the network, and of the limits."
        if needed
        else f"Leave --backend {name} out."
    )
    return level(CHECK, what[:600], hint, backend=name)


def _between_workers(backend: str, device: str, workers: int) -> list[dict[str, Any]]:
    """Start workers as a run would, and return what rank 0 measured."""
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        options = RunOptions(
            workers=workers,
            backend=backend,
            device=device,
            elastic=False,
            hang_timeout=HANG_S,
            out=Path(folder),
        )
        launcher = LocalLauncher(Quiet())
        outcome = launcher.launch(api.plan(launcher, "paceline.doctor.live:main", (), {}, options, threads=1))
    if outcome.failure is not None:
        raise PacelineError(outcome.failure.message)
    timings: list[dict[str, Any]] = outcome.value()[0]
    return timings


def _alone(backend: str) -> None:
    summed = LocalLauncher(Quiet()).ask(ReduceAlone(backend))
    if summed != [0.0, 1.0, 2.0, 3.0]:
        raise PacelineError(f"a sum over one worker gave {summed}")


def _under_mpiexec(*, needed: bool) -> list[Finding]:
    """Start this command once more, as a job of MPI's, and pass on what it measured."""
    again = ("doctor", "--backend", "mpi", "--json")
    ended = within(MPI_S, mpiexec.started(mpiexec.program() or "mpiexec", WORKERS, again).words)
    try:
        told = json.loads(ended.stdout.splitlines()[-1])["findings"]
        found = [Finding(**{**one, "level": Level(one["level"])}) for one in told if one["check"] == CHECK]
    except (LookupError, ValueError, TypeError):
        found = []
    if found and all(one.level is Level.OK for one in found):
        return found
    why = (
        found[0].what
        if found
        else ended.stderr.strip()[-300:] or f"mpiexec ended with status {ended.returncode}"
    )
    return [_broken("mpi", why, needed=needed)]


def within(seconds: float, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command that reads nothing and return what it printed; raise TimeoutExpired where it takes longer, and leave nothing.

    It is asked to end first: mpiexec's own children have sessions of their own, which it alone can reach.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as started:
        try:
            output, errors = started.communicate(timeout=seconds)
        except BaseException:
            started.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, started.returncode, output, errors)

"""How many processes and threads a run may start here: one command must not use up all process ids. Imports no torch."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from paceline.errors import InputError
from paceline.observe.formats import plural
from paceline.world import env

OWN_THREADS = 8
"""What a worker has beside the threads that compute: gloo's, the loader's, the one that listens."""
CROWDED = 8
"""Workers per core that are started without a note; a few more than one are usual in a trial."""
SHARE = 0.5
"""How much of the machine's limit one run may take; others need some."""


OWN_FILES, WORKER_FILES = 44, 6
"""How many files a launcher has open by itself, and for each worker: its pipes, its control, its status page."""


def check_process_limit(workers: int, threads: int, loaders: int = 0) -> None:
    """Raise InputError where the workers, their threads and loading processes need more process ids or files than there are."""
    needed = workers * (threads + OWN_THREADS + loaders * (1 + OWN_THREADS))
    most = int(limit() * SHARE)
    if needed > most:
        loading = f" and {plural(loaders, 'loading process', 'loading processes')}" if loaders else ""
        each = f" with {plural(threads, 'thread')}{loading} each"
        raise InputError(
            f"{_need(workers, each)} {needed:,} process ids, and this machine has "
            f"{most:,} to spare. Use fewer --workers or --threads."
        )
    files, allowed = OWN_FILES + WORKER_FILES * workers, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if allowed != resource.RLIM_INFINITY and files > allowed:
        raise InputError(
            f"{_need(workers)} {files:,} open files, and a process may have {allowed:,} here. Raise it: ulimit -n "
            f"{max(1024, 2 * files)}."
        )


def _need(workers: int, what: str = "") -> str:
    return f"{plural(workers, 'worker')}{what} {'needs' if workers == 1 else 'need'} about"


def crowded(workers: int) -> str | None:
    """Return what to say where the workers of this machine are far more than its cores; None where they are not."""
    cores = env.cores()
    if workers <= CROWDED * cores:
        return None
    return (
        f"{workers} workers share the {cores} cores of this machine, and each is a process with a model of its own. "
        "More than one worker per core makes no run faster."
    )


def limit() -> int:
    """Return how many processes and threads there may be: the least of what the kernel, the user and the container allow."""
    known = [_number(Path("/proc/sys/kernel/pid_max")), _number(Path("/proc/sys/kernel/threads-max"))]
    known += [_number(path / "pids.max") for path in control_groups("pids")]
    if os.geteuid() != 0:  # root is not held to it
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        known.append(None if soft == resource.RLIM_INFINITY else soft)
    return min((number for number in known if number is not None), default=32768)


def control_groups(controller: str) -> list[Path]:
    """Return the folders of this process's control group and all above it, as far as they are visible."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = [root, root / controller]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # One tree for all, or (version 1) its own.
        if not controllers or controller in controllers.split(","):
            base = root / controller if controllers else root
            own = base / path.lstrip("/")
            found += [one for one in (own, *own.parents) if one.is_relative_to(base)]
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None

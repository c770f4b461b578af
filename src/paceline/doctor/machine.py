"""Cores and memory: what the machine has, and what a container may use of it. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.doctor.finding import Finding, ok, warn
from paceline.launch.workers.process_limit import control_groups
from paceline.observe.formats import plural
from paceline.world import env

GIB = 2**30
WORKER_BYTES = 400 << 20
"""What a worker takes before its model: torch 2.13, the interpreter and gloo's buffers, without what forked workers share."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def processor() -> list[Finding]:
    """Look at the cores, the share of them that a container may use, and variables that ask for more threads."""
    cores, quota = env.cores(), cpu_quota()
    facts = {"cores": cores, "cores_of_machine": os.cpu_count(), "quota": quota}
    usable = cores if quota is None else min(cores, quota)
    found = [ok("processor", f"{plural(cores, 'core')}{_of_all(cores)}", **facts)]
    if quota is not None and quota < cores:
        found = [
            warn(
                "processor",
                f"{plural(cores, 'core')} are visible, but the control group allows the time of {quota:g}",
                f"Use --workers times --threads of {max(1, int(quota))} or less, or raise the container's limit (--cpus).",
                **facts,
            )
        ]
    for name in _THREADS:
        text = (env.read(name) or "").partition(",")[0].strip()
        if text.isdigit() and int(text) > usable:
            found.append(
                warn(
                    "threads",
                    f"{name} asks each worker for {text} threads, and there are {usable:g} cores for all of them",
                    f"Unset {name}: each worker then gets its share of the cores. Or give --threads.",
                )
            )
    return found


def _of_all(cores: int) -> str:
    there = os.cpu_count() or cores
    return f" of the machine's {there} (taskset, or a cpuset)" if cores < there else ""


def cpu_quota() -> float | None:
    """Return how many cores' time this process's control groups allow; None where they set no limit."""
    allowed = []
    for path in control_groups("cpu"):
        quota, _, period = (_text(path / "cpu.max") or "").partition(" ")
        if not quota:
            quota, period = _text(path / "cpu.cfs_quota_us") or "", _text(path / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            allowed.append(int(quota) / int(period))
    return min(allowed, default=None)


def memory() -> list[Finding]:
    """Look at the host's memory: what is free of it, and what a container may have."""
    total, available = memory_bytes()
    what = f"{available / GIB:.1f} GiB of memory free of {total / GIB:.1f}"
    facts = {"total": total, "available": available}
    workers = available // WORKER_BYTES
    if workers >= env.cores():
        return [ok("memory", what, **facts)]
    return [
        warn(
            "memory",
            f"{what}: room for about {plural(workers, 'worker')} before any model",
            f"Use at most --workers {max(1, workers)}, end what else runs here, or raise the container's limit.",
            **facts,
        )
    ]


def memory_bytes() -> tuple[int, int]:
    """Return the memory that there is for this process and all others with it, and what is free of it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    known = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    total, available = known["MemTotal"], known.get("MemAvailable", known["MemFree"])
    for path in control_groups("memory"):
        limit = _number(path / "memory.max", path / "memory.limit_in_bytes")
        used = _number(path / "memory.current", path / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < total:
            total = limit
            # What files take in memory goes when somebody needs it.
            available = min(available, limit - used + _cached_bytes(path))
    return total, max(0, available)


def _cached_bytes(path: Path) -> int:
    lines = (_text(path / "memory.stat") or "").splitlines()
    known = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(known.get("inactive_file", 0))


def _number(*paths: Path) -> int | None:
    texts = (_text(path) for path in paths)
    return next((int(text) for text in texts if text is not None and text.isdigit()), None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None

"""What this user or container may open and start: files, processes, shared memory, address space. Imports no torch."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from paceline.doctor.finding import Finding, ok, warn
from paceline.launch.workers import process_limit
from paceline.observe.formats import plural
from paceline.world import env

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where the C library keeps it)
SHARED_BYTES = 256 << 20
"""Less than this is soon full: one batch in flight per loading process, or NCCL's buffers of 8 ranks. Docker gives 64 MiB."""
CHANNEL_BYTES = 1 << 36
"""Address space of the memory that workers of one machine exchange gradients through (`world/shared_memory.py`)."""


def open_files() -> list[Finding]:
    """Look at how many files a process may have open; the launcher raises the soft limit to the hard one by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return [ok("files", "a process may have any number of files open", soft=soft, hard=None)]
    workers = max(0, (hard - process_limit.OWN_FILES) // process_limit.WORKER_FILES)
    what = f"a process may have {plural(hard, 'file')} open, enough for {plural(workers, 'worker')}"
    if workers >= max(16, env.cores()):
        return [ok("files", what, soft=soft, hard=hard)]
    remedy = (
        "Raise it: `ulimit -n 65536`, LimitNOFILE= in a systemd unit, or --ulimit nofile=65536 for a container. "
        "The hard limit needs root."
    )
    return [warn("files", what, remedy, soft=soft, hard=hard)]


def processes() -> list[Finding]:
    """Look at how many processes and threads there may be."""
    most = process_limit.limit()
    workers = int(most * process_limit.SHARE) // (1 + process_limit.OWN_THREADS)
    what = f"{most:,} processes and threads may run, enough for {plural(workers, 'worker')}"
    if workers >= env.cores():
        return [ok("processes", what, limit=most)]
    return [warn("processes", what, "Raise it: `ulimit -u`, or --pids-limit of the container.", limit=most)]


def shared_memory() -> list[Finding]:
    """Look at /dev/shm, through which loading processes hand over batches and NCCL and MPI exchange tensors."""
    if not SHARED_MEMORY.is_dir():
        return [
            warn(
                "shared memory",
                f"there is no {SHARED_MEMORY}: loading processes (--num-workers), NCCL and MPI need it",
                f"Mount it: mount -t tmpfs -o size=4g tmpfs {SHARED_MEMORY}.",
            )
        ]
    there = os.statvfs(SHARED_MEMORY)
    size, free = there.f_frsize * there.f_blocks, there.f_frsize * there.f_bavail
    what = f"{SHARED_MEMORY} has {_mib(free)} free of {_mib(size)}"
    facts = {"size": size, "free": free, "writable": os.access(SHARED_MEMORY, os.W_OK)}
    if not facts["writable"]:
        remedy = f"Make it writable: chmod 1777 {SHARED_MEMORY}."
        return [
            warn(
                "shared memory", f"{SHARED_MEMORY} cannot be written, as --num-workers needs", remedy, **facts
            )
        ]
    if size == 0 or free >= SHARED_BYTES:  # a file system without a limit of its own says 0
        return [ok("shared memory", what, **facts)]
    return [
        warn(
            "shared memory",
            f"{what}: loading processes (--num-workers), NCCL and MPI end with a bus error or 'no space left' once it is full",
            f"Enlarge it: mount -o remount,size=4g {SHARED_MEMORY}; for a container --shm-size=4g (or --ipc=host); on "
            f"Kubernetes an emptyDir with medium Memory. If old files fill it, delete them.",
            **facts,
        )
    ]


def address_space() -> list[Finding]:
    """Look for limits that keep workers of one machine from sharing memory: they would use sockets, slower."""
    found = []
    for name, kind, flag in (
        ("address space", resource.RLIMIT_AS, "-v"),
        ("size of files", resource.RLIMIT_FSIZE, "-f"),
    ):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY and soft < CHANNEL_BYTES:
            found.append(
                warn(
                    "limits",
                    f"the {name} of a process is limited to {_mib(soft)}, so workers of this machine exchange gradients over "
                    "sockets and not through shared memory",
                    f"Lift it: ulimit {flag} unlimited.",
                    limit=soft,
                )
            )
    return found


def _mib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"

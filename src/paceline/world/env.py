"""The process environment: the only file that reads or writes `os.environ`.

A launcher (paceline's own, torchrun, `python -m torch.distributed.launch`, a scheduler) tells a worker who it
is through a handful of variables. They are read here once, checked, and handed on as a typed `Identity`.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.errors import InputError

_MPI = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
)
"""The variables of MPICH's launcher (and Intel's), and of Open MPI's."""
LOOPBACK = "127.0.0.1"
_RUN_ID = "paceline"
"""The run id of a run that nobody has given one."""
_OWN_RUN = "PACELINE_RUN"
"""The variable that repeats where the ranks meet: a torchrun that a worker starts inherits it, but its ranks meet elsewhere."""
SECRET, SECRET_FILE = "PACELINE_SECRET", "PACELINE_SECRET_FILE"
"""The variables that hold the run's secret, or name the file that does."""
STORE, RUNTIME_DIR = "PACELINE_STORE", "PACELINE_RUNTIME_DIR"
"""The variables that say where the launcher serves the run's store, and in which folder workers may open their sockets."""

CHANGED_VALUES = "PACELINE_CHANGED_VALUES"
"""The variable that says what becomes of values that the launching process has changed and workers have not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who a launcher says this worker is."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int = 0
    nodes: int = 1
    master_address: str = LOOPBACK
    master_port: int = 0
    """Where rank 0 keeps torch's store, for scripts that form a group of torch's by themselves; 0 when no launcher gave one."""
    store: str = ""
    """Where the launcher serves the run's store: `ipc://PATH` or `tcp://HOST:PORT`; empty where another launcher has no such."""
    launch: int = 0
    """How many calls that join this world the process has made before; where they meet, each has a place of its own."""

    def __post_init__(self) -> None:
        _check_range("RANK", self.rank, "WORLD_SIZE", self.size)
        _check_range("LOCAL_RANK", self.local_rank, "LOCAL_WORLD_SIZE", self.local_size)
        _check_range("GROUP_RANK", self.node_rank, "GROUP_WORLD_SIZE", self.nodes)
        if not 0 <= self.master_port <= 65535:
            raise InputError(f"MASTER_PORT is {self.master_port}, which is no port. Set one from 1 to 65535.")

    def variables(self) -> dict[str, str]:
        """Return what a worker's environment says about it, by torchrun's names, so that its scripts run."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RUN_ID": _RUN_ID,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            **(
                {STORE: self.store, _OWN_RUN: f"{self.master_address}:{self.master_port}"}
                if self.store
                else {}
            ),
            # The launcher removes the folder, however its workers end.
            **({RUNTIME_DIR: str(Path(self.store[6:]).parent)} if self.store.startswith("ipc://") else {}),
        }


def identity() -> Identity | None:
    """Read who this worker is, or give None when no launcher set RANK and WORLD_SIZE.

    What a bare launcher leaves out is filled in as if all workers were on one node.
    """
    rank, size = _integer("RANK"), _integer("WORLD_SIZE")
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        there, missing = ("RANK", "WORLD_SIZE") if size is None else ("WORLD_SIZE", "RANK")
        raise InputError(
            f"{there} is set but {missing} is not, so this worker has no place. Set both or neither."
        )
    local_size = _integer("LOCAL_WORLD_SIZE")
    nodes = _integer("GROUP_WORLD_SIZE")
    if nodes is None:
        nodes = max(1, size // max(1, local_size)) if local_size is not None else 1
    if local_size is None:
        local_size = max(1, size // max(1, nodes))
    local_rank = _integer("LOCAL_RANK")
    node_rank = _integer("GROUP_RANK")
    if node_rank is None:
        node_rank = _integer("NODE_RANK")
    return Identity(
        rank=rank,
        size=size,
        local_rank=rank % max(1, local_size) if local_rank is None else local_rank,
        local_size=local_size,
        node_rank=min(rank // max(1, local_size), nodes - 1) if node_rank is None else node_rank,
        nodes=nodes,
        master_address=read("MASTER_ADDR") or LOOPBACK,
        master_port=_integer("MASTER_PORT") or 0,
        store=(read(STORE) or "") if read(_OWN_RUN) == f"{read('MASTER_ADDR')}:{read('MASTER_PORT')}" else "",
    )


class MpiRank(NamedTuple):
    """What an MPI launcher says of a process; on which machine it is, and with how many others, where it says so."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


def mpi_rank() -> MpiRank | None:
    """Read who an MPI launcher says this process is, or give None when none started it.

    `srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE, too, and says the same by its own variables, which count. How many ranks
    are on a machine only a launcher of MPI's says, be it inside a job of SLURM's or not.
    """
    for names in _MPI:
        rank, size, local_rank, local_size = map(_integer, names)
        of_srun = local_size is None and (rank, size) == _slurm_place()
        if rank is not None and size is not None and not of_srun:
            return MpiRank(rank, size, local_rank, local_size)
    return None


def _slurm_place() -> tuple[int | None, int | None]:
    return _integer("SLURM_PROCID"), _integer("SLURM_STEP_NUM_TASKS")


class SlurmTask(NamedTuple):
    """What SLURM says of a task that `srun` has started."""

    job: int
    step: int
    rank: int
    size: int
    local_rank: int
    node_rank: int
    nodes: int
    tasks_per_node: str
    """As SLURM writes it: 2(x3),1."""
    node_list: str
    """As SLURM writes it: node[01-03],login."""


def slurm_task() -> SlurmTask | None:
    """Read which of several tasks of `srun` this process is, or give None when it is none.

    A batch script has SLURM_PROCID, too, but no step; a step of one task has no world to join. Ranks of `mpirun` in a job are
    beside a task of SLURM's, by which their machine was reached: MPI says who they are.
    """
    rank, size = _slurm_place()
    job, step = _integer("SLURM_JOB_ID"), _integer("SLURM_STEP_ID")
    if rank is None or size is None or job is None or step is None or size < 2 or mpi_rank() is not None:
        return None
    return SlurmTask(
        job=job,
        step=step,
        rank=rank,
        size=size,
        local_rank=_integer("SLURM_LOCALID") or 0,
        node_rank=_integer("SLURM_NODEID") or 0,
        nodes=_integer("SLURM_STEP_NUM_NODES") or 1,
        tasks_per_node=read("SLURM_STEP_TASKS_PER_NODE") or str(size),
        node_list=read("SLURM_STEP_NODELIST") or host(),
    )


def has_agent_store() -> bool:
    """Return whether torchrun's agent keeps the store that the ranks meet at, and no rank does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def read(name: str) -> str | None:
    """Return a variable's text, or None when it is not set."""
    return os.environ.get(name)


def refuses_changed_values() -> bool:
    """Return whether a run ends where workers lack what the launching process has changed; else that is told."""
    said = read(CHANGED_VALUES) or "refuse"
    if said not in ("refuse", "note"):
        raise InputError(f"{CHANGED_VALUES} is {said!r}, but must be refuse or note.")
    return said == "refuse"


def export(variables: Mapping[str, str]) -> None:
    """Set variables for this process and the ones it starts."""
    os.environ.update(variables)


@contextmanager
def preserved(*names: str) -> Iterator[None]:
    """Put these variables back afterwards to what they were before."""
    before = {name: read(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def replace(variables: Mapping[str, str]) -> None:
    """Make the environment exactly this."""
    os.environ.clear()
    os.environ.update(variables)


def working_folder() -> str:
    """Return the folder that this process is in."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise InputError(
            "the working folder of this process has been deleted. Change (cd) into one that is there, and try again."
        ) from None


def host() -> str:
    """Return this machine's name."""
    return socket.gethostname()


def kernel() -> str:
    """Return what tells starts of kernels apart, and so machines: a name may be shared. Empty where the kernel does not say."""
    place = Path("/proc/sys/kernel/random/boot_id")
    return place.read_text().strip() if place.exists() else ""


def namespace(kind: str) -> str:
    """Return which namespace this process is in, "net" or "pid": a container has its own. Empty where the kernel does not say."""
    place = Path("/proc/self/ns", kind)
    return str(place.readlink()) if place.is_symlink() else ""


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def snapshot() -> dict[str, str]:
    """Copy the whole environment."""
    return dict(os.environ)


def _integer(name: str) -> int | None:
    text = read(name)
    if text is None or not text.strip():
        return None
    if re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text) is None:  # int() would take 1_0 for 10
        raise InputError(
            f"{name} is {text!r}, which is no whole number. Launch with torchrun, or correct it."
        )
    return int(text)


def _check_range(name: str, value: int, bound_name: str, bound: int) -> None:
    if bound < 1:
        raise InputError(
            f"{bound_name} is {bound}, but a world has at least one worker. Set it to 1 or more."
        )
    if not 0 <= value < bound:
        raise InputError(
            f"{name} is {value} but {bound_name} is {bound}. "
            f"{name} must be from 0 to {bound - 1}: check the launcher."
        )

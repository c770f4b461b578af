"""Joins a world that SLURM has started: `srun -n 4 paceline train TASK`, one worker per task.

Rank 0 serves the run's store: for one node in a folder that only this user may enter, for several on a port of the first node
that follows from the job's number, with the secret that all tasks have. From then on a task is told who it is as paceline's own
launcher tells its workers.
"""

from __future__ import annotations

import atexit
import re
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.errors import InputError
from paceline.launch.clusters.joined import JoinedLauncher
from paceline.transport.addresses import at
from paceline.transport.runtime_folder import RuntimeFolder
from paceline.transport.secret import Secret
from paceline.transport.store_server import StoreServer
from paceline.world import env, interfaces
from paceline.world.env import Identity, SlurmTask
from paceline.world.run_secret import run_secret

if TYPE_CHECKING:
    from paceline.transport.store import RunStore

PORTS = range(15000, 30000, 2)
"""Below the ports that Linux hands out by itself; the store listens on the one after it."""
LEFT = "slurm/left"
GOODBYE_S = 5.0
LAST_S = 10.0
"""How long rank 0 serves the store for tasks that are not through yet; they end within moments, or are gone."""


class SlurmLauncher(JoinedLauncher):
    """This very process is a task of SLURM's."""

    name = "slurm"
    starter = "srun"

    def detect(self) -> bool:
        """Look for the variables of `srun`, beside those that `enter` has set."""
        return env.slurm_task() is not None and super().detect()


def enter() -> None:
    """Set for this process, where `srun` has started it as one of several, who it is and where all tasks meet.

    Where RANK is set somebody else has said so.
    """
    task = env.slurm_task()
    if task is None or env.read("RANK") is not None:
        return
    port = port_of(task.job, task.step)
    address, store = _meet_here(task) if task.nodes == 1 else _meet_at(task, first_node(task.node_list), port)
    identity = Identity(
        rank=task.rank,
        size=task.size,
        local_rank=task.local_rank,
        local_size=tasks_on(task.tasks_per_node, task.node_rank),
        node_rank=task.node_rank,
        nodes=task.nodes,
        master_address=address,
        master_port=port,
        store=store,
    )
    env.export(identity.variables())


def port_of(job: int, step: int) -> int:
    """Return the port at which the tasks of a step meet: another one for most other jobs of the same machine."""
    return PORTS[(job + 97 * step) % len(PORTS)]


def first_node(node_list: str) -> str:
    """Return the first name of a list of nodes as SLURM writes it: node[01-03],login."""
    found = re.match(r"[^\[,]+(?:\[[^\]]*\][^\[,]*)*", node_list.strip())
    if found is None:
        raise InputError(f"SLURM_STEP_NODELIST is {node_list!r}, which names no node. Start this with srun.")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", found[0])


def tasks_on(tasks_per_node: str, node: int) -> int:
    """Return how many tasks one node has, of what SLURM writes for all: 2(x3),1."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if found is None:
            raise InputError(
                f"SLURM_STEP_TASKS_PER_NODE is {tasks_per_node!r}, which is no list of numbers. Start this with srun."
            )
        counts += [int(found[1])] * int(found[2] or 1)
    if node >= len(counts):
        raise InputError(f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE is {tasks_per_node!r}.")
    return counts[node]


def _meet_here(task: SlurmTask) -> tuple[str, str]:
    """Return where the tasks of one node meet."""
    folder = RuntimeFolder(f"slurm-{task.job}-{task.step}")
    address = folder.address("store")
    atexit.register(folder.close)
    _serve(task, address, address, None)
    return env.LOOPBACK, address


def _meet_at(task: SlurmTask, node: str, port: int) -> tuple[str, str]:
    """Return where the tasks of several nodes meet."""
    secret = run_secret()
    if secret is None:
        raise InputError(
            f"these tasks are on {task.nodes} nodes and share no secret, so anybody on the network could join. Before srun, "
            f"export {env.SECRET}=$(openssl rand -hex 32), or {env.SECRET_FILE} to a file that only you may read."
        )
    address = f"tcp://{at(node, port + 1)}"
    own = f"tcp://{at(interfaces.address_to_bind(node), port + 1)}" if task.rank == 0 else ""
    _serve(task, own, address, secret)
    return node, address


def _serve(task: SlurmTask, own: str, address: str, secret: Secret | None) -> None:
    """Serve the store on rank 0, until all others have left it."""
    if task.rank > 0:
        atexit.register(_leave, address)
        return
    try:
        server = StoreServer(own, secret=secret)
    except OSError as error:
        raise InputError(
            f"{own} cannot be listened on ({error.strerror or error}), and it is where the tasks of job {task.job} meet. "
            "Start them once more: another step has another port."
        ) from None
    atexit.register(server.close)
    atexit.register(_wait_for_others, address, task.size - 1)


def _leave(address: str) -> None:
    """Report that this task needs the store no more."""
    store = _used(address)
    if store is not None:
        with suppress(RuntimeError):  # no answer: rank 0 is gone
            store.add(LEFT, 1)


def _wait_for_others(address: str, others: int) -> None:
    """Wait until all other tasks have left."""
    store, deadline = _used(address), time.monotonic() + LAST_S
    with suppress(RuntimeError):  # no answer: the store has failed, and there is nobody to wait for
        while store is not None and store.add(LEFT, 0) < others and time.monotonic() < deadline:
            time.sleep(0.02)


def _used(address: str) -> RunStore | None:
    """Return the store where this task may have used it: that takes torch."""
    if "torch" not in sys.modules:
        return None
    from paceline.transport.store import StoreTimeoutError
    from paceline.world.join import run_store

    return run_store(address).for_group(timeout_s=GOODBYE_S, timed_out=StoreTimeoutError)

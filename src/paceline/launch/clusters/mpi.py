"""Joins a world that an MPI launcher has started: `mpirun -n 4 paceline train TASK`, with any backend.

The ranks meet through MPI itself: rank 0 serves the run's store and broadcasts where it is. From then on a rank is told who it is
as paceline's own launcher tells its workers.
"""

from __future__ import annotations

import sys
from typing import Any

from paceline.errors import InputError
from paceline.launch.base import LaunchPlan, Outcome
from paceline.launch.clusters.joined import JoinedLauncher
from paceline.launch.store import MeetingPoint
from paceline.transport.runtime_folder import RuntimeFolder
from paceline.transport.secret import Secret
from paceline.world import env, interfaces
from paceline.world.env import Identity
from paceline.world.mpi import library
from paceline.world.run_secret import run_secret

FIXED = (
    "note: MPI cannot replace a rank that is lost, so the first one ends this run, as with --no-elastic; "
    "--save-every N saves on the way, and --resume goes on from the last checkpoint."
)


class MpiLauncher(JoinedLauncher):
    """This very process is a rank of MPI's."""

    name = "mpi"
    starter = "MPI's launcher (mpirun, mpiexec)"

    def detect(self) -> bool:
        """Look for the variables of an MPI launcher, beside those that `enter` has set."""
        return env.mpi_rank() is not None and super().detect()

    def launch(self, plan: LaunchPlan) -> Outcome:
        """Do the work here; what goes wrong ends this process without MPI_Finalize, and so the others."""
        identity = plan.jobs[0].identity
        elastic = plan.record.get("options", {}).get("elastic", False)
        if elastic and identity.rank == 0 and identity.size > 1:
            print(FIXED, file=sys.stderr)  # noqa: T201
        try:
            return super().launch(plan)
        except BaseException:
            library.abandon()
            raise


def enter() -> None:
    """Set for this process, where an MPI launcher has started it, who it is and where all ranks meet.

    Where RANK is set somebody else has said so. Where MASTER_PORT is set the ranks meet there, which needs no mpi4py.
    """
    started = env.mpi_rank()
    if started is None or env.read("RANK") is not None:
        return
    if env.read("MASTER_PORT") is not None:
        local = {"LOCAL_RANK": started.local_rank, "LOCAL_WORLD_SIZE": started.local_size}
        said = {"RANK": started.rank, "WORLD_SIZE": started.size, **local}
        env.export({name: str(value) for name, value in said.items() if value is not None})
        return
    _meet(library.load().COMM_WORLD, started)


def _meet(world: Any, started: env.MpiRank) -> None:
    rank, size = world.Get_rank(), world.Get_size()
    if (rank, size) != (started.rank, started.size):
        raise InputError(
            f"the launcher says that this is rank {started.rank} of {started.size}, and MPI that it is rank {rank} of {size}: "
            "they are of different MPIs, so no rank would know of the others. Use the mpirun of the MPI that mpi4py loads "
            f"(the one beside {sys.executable} where that is the wheel's)."
        )
    networks: list[str] = world.allgather(interfaces.network())
    nodes = list(dict.fromkeys(networks))
    beside = [one for one, network in enumerate(networks) if network == networks[rank]]
    hosts: list[str] = world.allgather(env.host())
    other = next(
        (host for host, network in zip(hosts, networks, strict=True) if network != networks[0]), None
    )
    said = world.bcast(_serve(other) if rank == 0 else None)
    address, port, store, made_secret = said
    if len(nodes) > 1 and not made_secret and run_secret() is None:
        raise InputError(
            f"rank 0 has a secret in {env.SECRET}, but {hosts[rank]} has none. Set it on all machines, or on none."
        )
    identity = Identity(
        rank=rank,
        size=size,
        local_rank=beside.index(rank),
        local_size=len(beside),
        node_rank=nodes.index(networks[rank]),
        nodes=len(nodes),
        master_address=address,
        master_port=port,
        store=store,
    )
    env.export(identity.variables() | ({env.SECRET: made_secret} if made_secret else {}))


def _serve(other: str | None) -> tuple[str, int, str, str]:
    """Serve the store that all ranks meet at; return this machine's address, a free port, the store's address and a secret.

    `other` is the name of another machine, where there is one. The secret is empty where one machine needs none, or where
    somebody has set one, which then is never sent.
    """
    given = run_secret()
    secret = None if other is None else given or Secret.make()
    address = env.LOOPBACK if other is None else interfaces.reaching(other).address
    folder = RuntimeFolder()
    point = MeetingPoint(address, folder, secret)

    def close() -> None:
        point.close()
        folder.close()

    library.when_all_have_left(close)
    made = "" if secret is None or given is not None else secret.text
    return address, point.port, point.address(address), made

"""Who starts the workers of a command: this process, or another program that starts the command once more for each of them."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Annotated

import typer

from paceline.errors import InputError, UnknownNameError
from paceline.launch.clusters.commands import Starter
from paceline.launch.clusters.mpiexec import Mpiexec
from paceline.launch.clusters.ray import Ray
from paceline.launch.clusters.ssh import Ssh
from paceline.launch.clusters.torchrun import Torchrun
from paceline.launch.submit.options import SYSTEMS
from paceline.option_fields import MACHINES
from paceline.training.options import RunOptions
from paceline.world import env

AUTO, LOCAL, MPI, RAY, SSH, TORCHRUN = "auto", "local", "mpi", "ray", "ssh", "torchrun"
ON = (AUTO, LOCAL, TORCHRUN, MPI, SSH, RAY)
On = Annotated[
    str,
    typer.Option(
        help="Who starts the workers: local (paceline), torchrun, mpi, ssh or ray. Default: whoever has started this "
        "process; else ssh with --hosts, mpi with --backend mpi, or local.",
        show_default=False,
        rich_help_panel=MACHINES,
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        metavar="HOST,...", help="Machines to run on, over ssh; the first leads.", rich_help_panel=MACHINES
    ),
]
SshCommand = Annotated[
    str,
    typer.Option(
        metavar="COMMAND", help="The ssh of --hosts, with options of your own.", rich_help_panel=MACHINES
    ),
]
Resources = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=AMOUNT,...",
        help="With --on ray: what a node must have free, such as CPU=4,GPU=1. Default: a core per worker.",
        rich_help_panel=MACHINES,
    ),
]


def start_elsewhere(
    options: RunOptions,
    *,
    on: str = AUTO,
    hosts: str | None = None,
    ssh: str = SSH,
    resources: str | None = None,
    given: Collection[str] = (),
    dry_run: bool = False,
) -> int | None:
    """Have another program start the workers of this command, or print how; None where they are started, or joined, here.

    `given` are the names of the options that the command line has: what a file of options, or the run that is resumed, has does
    not count against what is decided here.
    """
    starter = _starter(options, on, hosts, ssh, resources)
    if isinstance(starter, Ray) and {"rendezvous", "lead"} & {*given}:
        raise InputError("--on ray chooses the node that leads by itself. Leave out --rendezvous and --lead.")
    if isinstance(starter, Ssh) and "lead" in given:
        raise InputError("--lead is for machines that are started one by one: the first of --hosts leads.")
    if starter is None:
        return None
    arguments = sys.argv[1:]
    if not dry_run:
        return starter.start(options, arguments)
    for command in starter.commands(options, [word for word in arguments if word != "--dry-run"]):
        print(command)  # noqa: T201
    return 0


def _starter(
    options: RunOptions, on: str, hosts: str | None, ssh: str, resources: str | None
) -> Starter | None:
    if on in SYSTEMS:
        raise InputError(f"--on {on} is for jobs. Use paceline submit --on {on} with the same options.")
    if on not in ON:
        raise UnknownNameError("--on", on, ON)
    if hosts is not None and on not in (AUTO, SSH):
        raise InputError(
            f"--hosts is for machines that are reached over ssh, and --on is {on}. Leave one out."
        )
    if resources is not None and on != RAY:
        raise InputError("--resources says what a node of a Ray cluster must have. Use --on ray.")
    if on == SSH and hosts is None:
        raise InputError("--on ssh needs the machines. Give --hosts a,b,c.")
    identity = env.identity()
    if identity is not None:
        joined = MPI if env.mpi_rank() is not None else TORCHRUN
        if hosts is not None or on not in (AUTO, joined):
            raise InputError(
                f"--{'hosts' if hosts is not None else 'on'} says how workers are started, but this process is rank "
                f"{identity.rank} of {identity.size} already. Leave it out."
            )
        return None
    if hosts is not None:
        return Ssh(hosts, ssh)
    if on == RAY:
        return Ray(resources)
    by_mpi = on == MPI or (on == AUTO and options.backend == "mpi" and options.processes > 1)
    return Mpiexec() if by_mpi else Torchrun() if on == TORCHRUN else None

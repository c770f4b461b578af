"""`paceline run`: start any script on several workers, as torchrun does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.generated import Given, takes
from paceline.cli.options import folder_option, new_folder
from paceline.cli.outcome import report
from paceline.errors import InputError
from paceline.ranges import WORKERS
from paceline.remote.names import Roles
from paceline.training.options import RunOptions
from paceline.world import env

if TYPE_CHECKING:
    from paceline.launch.nodes.rendezvous import Rendezvous as Meeting


@takes(
    RunOptions,
    only=("nodes", "rendezvous", "lead", "secret_file", "join_timeout", "machine_timeout", "grace"),
)
def run(
    context: typer.Context,
    given: Given,
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT [ARGS]...", help="A Python file (or, with -m, a module) and its own arguments."
        ),
    ],
    workers: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--workers",
            "--nproc-per-node",
            "--nproc_per_node",
            help="How many processes, on each machine. Default: 1, or as many as the roles have.",
        ),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE=N,...",
            help="Name groups of workers, as in trainers=2,servers=1, on all machines together; the script meets the others "
            "with paceline.remote.join().",
        ),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            help="With --roles: where calls are taken. Default: lo, this machine only, or what leads to --rendezvous."
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="Threads of each worker. Default: cores / workers.")
    ] = None,
    out: Annotated[
        Path | None, folder_option("Where every rank's output goes. Default: runs/SCRIPT-TIME.")
    ] = None,
) -> int:
    """Start a script on several processes: any script that reads RANK, WORLD_SIZE and LOCAL_RANK."""
    from paceline.launch.base import LaunchSpec
    from paceline.launch.job import ScriptCall
    from paceline.launch.local import LocalLauncher
    from paceline.launch.nodes import machines
    from paceline.launch.policy import Policy

    if target.startswith("-"):
        raise InputError(
            f"paceline run has no option {target}. See paceline run --help; a script's own come after its name."
        )
    if not module and not Path(target).is_file():
        raise InputError(f"there is no script {target}. With -m it would be taken for a module.")
    named = _roles(roles, workers, interface)
    asked = RunOptions(**given)
    if asked.rendezvous is None:
        _check_alone(f"-m {target}" if module else target)
    where = machines.meeting(
        asked.rendezvous,
        str(asked.nodes),
        join_timeout=asked.join_timeout,
        machine_timeout=asked.machine_timeout,
        lead=asked.lead,
    )
    on_each = WORKERS.read("--workers", 1 if workers is None else workers)
    count = on_each * (1 if where is None else where.max_nodes) if named is None else named.size
    facts = {"script": target, "arguments": context.args, "workers": count}
    facts |= {} if named is None else {"roles": str(named)}
    spec = LaunchSpec(
        call=ScriptCall(target=target if module else str(Path(target).resolve()), is_module=module),
        workers=machines.share(count, where),
        threads=threads,
        out=out or new_folder(target.replace(".", "-") if module else Path(target).stem),
        arguments=[target, *context.args],
        record=facts,
        policy=Policy(workers=count, shards=count, elastic=False),
        grace=asked.grace,
        rendezvous=where,
        secret_file=asked.secret_file,
        agreed=machines.program_facts({**facts, "script": Path(target).name}, target) if where else {},
        **({} if named is None else _told(named, interface, where)),
    )
    launcher = LocalLauncher()
    return report(launcher.launch(launcher.plan(spec)))


def _check_alone(script: str) -> None:
    """Refuse to be one of several that mpirun or srun has started: each would start a world of its own."""
    rank, task = env.mpi_rank(), env.slurm_task()
    launcher, count = ("srun", task.size) if rank is None and task else ("mpirun", rank.size if rank else 1)
    if count > 1 and env.read("RANK") is None:
        raise InputError(
            f"{launcher} has started this command {count} times, and each would start workers that know nothing of the others. "
            f"Use paceline run --workers {count} without {launcher}, or {launcher} -n {count} python {script} where that calls "
            "paceline.launch; launchers that are to meet need --rendezvous."
        )


def _roles(text: str | None, workers: int | None, interface: str | None) -> Roles | None:
    """Read the roles, which say how many workers there are."""
    if text is None:
        if interface is not None:
            raise InputError(
                "--interface says where workers with roles take calls. Give --roles, or leave it out."
            )
        return None
    roles = Roles.parse(text)
    if workers is not None and workers != roles.size:
        raise InputError(
            f"--roles {text} makes {roles.size} workers, but --workers is {workers}. Leave --workers out."
        )
    return roles


def _told(roles: Roles, interface: str | None, where: Meeting | None) -> dict[str, Any]:
    """Return what workers with roles are told and need, as parts of a launch."""
    from paceline.launch.nodes import machines
    from paceline.launch.roles import role_variables, secret_variable
    from paceline.launch.workers.role_call import MODULES

    own = machines.taken(interface, where)
    return {"environment": role_variables(roles, own), "shared": secret_variable(), "modules": MODULES}

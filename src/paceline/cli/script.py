"""`paceline run`: start any script on several workers, as torchrun does."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline import option_fields
from paceline.cli.generated import Given, own, takes
from paceline.cli.options import folder_option, new_folder
from paceline.cli.outcome import report
from paceline.errors import InputError
from paceline.launch.torchrun_options import TorchrunOptions, meant
from paceline.ranges import WORKERS
from paceline.remote.names import Roles
from paceline.training.options import RunOptions
from paceline.world import env

if TYPE_CHECKING:
    from paceline.launch.base import LaunchSpec
    from paceline.launch.job import ScriptCall
    from paceline.launch.nodes.rendezvous import Rendezvous as Meeting
    from paceline.launch.workers.context import Worker

_OWN = ("nodes", "rendezvous", "lead", "secret_file", "join_timeout", "machine_timeout", "grace")
"""The options of a run that a script can have."""


@takes(
    RunOptions,
    only=_OWN,
    whole=(TorchrunOptions,),
    short={"redirects": "-r", "tee": "-t"},
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
    """Start a script on several processes: any script that reads RANK, WORLD_SIZE and LOCAL_RANK. Takes torchrun's options."""
    from paceline.launch.base import LaunchSpec
    from paceline.launch.nodes import machines
    from paceline.launch.policy import Policy

    environment = env.snapshot()
    as_torchrun = TorchrunOptions.of(own(TorchrunOptions, given), environment)
    asked = RunOptions(**meant(as_torchrun, {name: given[name] for name in given if name in _OWN}))
    module = module or environment.get("PET_MODULE", "0") not in ("", "0")
    call = _call(target, module=module, program=as_torchrun.no_python)
    named = _roles(roles, workers, interface)
    if asked.rendezvous is None:
        _check_alone(f"-m {target}" if module else target)
    where = machines.meeting(
        asked.rendezvous,
        str(asked.nodes),
        join_timeout=asked.join_timeout,
        machine_timeout=asked.machine_timeout,
        lead=asked.lead,
    )
    on_each = WORKERS.read("--workers", _per_node(workers, as_torchrun.nproc_per_node))
    count = on_each * (1 if where is None else where.max_nodes) if named is None else named.size
    facts = {"script": target, "arguments": context.args, "workers": count, **as_torchrun.agreed()}
    facts |= {} if named is None else {"roles": str(named)}
    spec = LaunchSpec(
        call=call,
        workers=machines.share(count, where),
        threads=threads,
        out=_folder(out, as_torchrun, target, module=module),
        arguments=[target, *context.args],
        variables=as_torchrun.variables(),
        output=as_torchrun.output(),
        master_port=(as_torchrun.master_port or 0) if where is None else 0,
        record=facts,
        policy=Policy(workers=count, shards=count, elastic=False),
        grace=asked.grace,
        rendezvous=where,
        secret_file=asked.secret_file,
        agreed=machines.program_facts({**facts, "script": Path(target).name}, target) if where else {},
        **({} if named is None else _told(named, interface, where)),
    )
    for note in as_torchrun.notes():
        print(note, file=sys.stderr)  # noqa: T201
    return _launch(spec, as_torchrun.max_restarts or 0)


def _call(target: str, *, module: bool, program: bool) -> ScriptCall:
    """Return what each worker runs."""
    from paceline.launch.job import ScriptCall

    if target.startswith("-"):
        raise InputError(
            f"paceline run has no option {target}. See paceline run --help; a script's own come after its name."
        )
    if module and program:
        raise InputError("--no-python takes a program, and -m a module of Python. Give one.")
    if program:
        return ScriptCall(target=target, is_program=True)
    if not module and not Path(target).is_file():
        raise InputError(f"there is no script {target}. With -m it would be taken for a module.")
    return ScriptCall(target=target if module else str(Path(target).resolve()), is_module=module)


def _per_node(workers: int | None, as_torchrun: str | None) -> int | str:
    """Return how many workers each machine has."""
    if as_torchrun is None:
        return 1 if workers is None else workers
    if workers is not None:
        raise InputError("--workers and --nproc-per-node are two names of one number. Give one.")
    text = as_torchrun.strip()
    if text == "cpu":
        return env.cores()
    if text in ("gpu", "auto"):
        from paceline.launch.local import LocalLauncher

        devices: int = LocalLauncher().ask(_count_gpus)
        if not devices and text == "gpu":
            raise InputError(
                "--nproc-per-node gpu: this machine has no GPU that torch can use. Give a number, or cpu."
            )
        return devices or env.cores()
    if not text.isdecimal():
        raise InputError(
            f"--nproc-per-node {as_torchrun} is no number of workers. Give one, gpu, cpu or auto."
        )
    return int(text)


def _count_gpus(worker: Worker) -> int:  # noqa: ARG001  (a worker's call takes it)
    import torch

    return torch.cuda.device_count()


def _folder(out: Path | None, as_torchrun: TorchrunOptions, target: str, *, module: bool) -> Path:
    """Return the run folder: --out, or one that is made in --log-dir or runs/."""
    if out is not None and as_torchrun.log_dir:
        raise InputError("--out names the run folder, and --log-dir the one that it is made in. Give one.")
    name = as_torchrun.rdzv_id or (target.replace(".", "-") if module else Path(target).stem)
    if as_torchrun.log_dir:
        return new_folder(name, option_fields.folder("--log-dir", as_torchrun.log_dir))
    return out or new_folder(target.replace(".", "-") if module else Path(target).stem)


def _launch(spec: LaunchSpec, restarts: int) -> int:
    """Run it, and all of its workers over again where one fails, so many times."""
    from paceline.launch.local import LocalLauncher

    for count in range(restarts + 1):
        told = {"TORCHELASTIC_RESTART_COUNT": str(count)} if count else {}
        launcher = LocalLauncher()
        outcome = launcher.launch(launcher.plan(replace(spec, variables={**spec.variables, **told})))
        status = report(outcome)
        failure = outcome.failure
        over = failure is None or outcome.interrupted is not None or failure.kind in ("input", "disk")
        if over or count == restarts:
            break
        print(  # noqa: T201
            f"note: starting all workers over: {count + 1} of --max-restarts {restarts}.", file=sys.stderr
        )
    return status


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

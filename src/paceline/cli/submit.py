"""`paceline submit`: give a training to the batch system of a cluster."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from paceline import ranges
from paceline.cli.generated import Given, takes
from paceline.cli.options import TASK, AsJson, Config, Settings, Threads, settings
from paceline.cli.outcome import print_json
from paceline.errors import InputError
from paceline.launch.submit.options import IN_SLURM, KUBERNETES, SubmitOptions
from paceline.launch.submit.request import SubmitRequest, arguments, workers_of
from paceline.option_fields import known_options
from paceline.strategies.tuning import Tuning
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec

_DECIDED = ("rendezvous", "lead", "secret_file")
"""What the job says by itself."""


@takes(
    SubmitOptions,
    RunOptions,
    Tuning,
    TrainSpec,
    words={"workers": "Processes on each machine. Default: one per GPU; the mesh's, or 1."},
    hidden=_DECIDED,
)
def submit(
    given: Given,
    task: Annotated[str | None, typer.Argument(help=TASK)] = None,
    set_: Settings = None,
    config: Config = None,
    threads: Threads = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION",
            rich_help_panel=IN_SLURM,
            help="One more option of sbatch, such as --sbatch=--constraint=h100; may be repeated.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted, and submit nothing.")
    ] = False,
    json_: AsJson = False,
) -> int:
    """Submit a training to a cluster: on SLURM a job that saves, queues itself again and goes on when its time is up."""
    from paceline.launch.submit import kubernetes, slurm
    from paceline.training import folder

    for name in _DECIDED:
        if name in given:
            raise InputError(f"--{name.replace('_', '-')} is for the job to decide. Leave it out.")
    own = {name: given.pop(name) for name in known_options(SubmitOptions) if name in given}
    request = _request(task, given, SubmitOptions(**own), set_, config, threads)
    if request.submit.on == KUBERNETES:
        if not dry_run:
            raise InputError(
                "paceline writes manifests for Kubernetes and leaves it to kubectl to apply them: add --dry-run, and pipe "
                "its output into `kubectl apply -f -`."
            )
        print(kubernetes.text(request), end="")  # noqa: T201
        return 0
    folder.check(request.options)
    extra = tuple(sbatch or ())
    if dry_run:
        print(slurm.script(request, extra), end="")  # noqa: T201
        return 0
    job = slurm.submit(request, extra)
    if json_:
        print_json({"run": str(request.out), "on": job.on, "job": job.id, "name": job.name})
    else:
        print(f"job {job.id} is submitted. `paceline status {quote(str(request.out))}` shows it.")  # noqa: T201
    return 0


def _check_settings(typed: str, spec: TrainSpec, on: str | None) -> None:
    """Refuse arguments that the task does not take; a task that only an image has says so there."""
    from paceline.launch import api
    from paceline.tasks import TASKS

    if spec.settings and (on != KUBERNETES or typed in TASKS):
        api.task_shards(spec)


def _request(
    task: str | None,
    given: Given,
    options: SubmitOptions,
    set_: list[str] | None,
    config: Path | None,
    threads: int | None,
) -> SubmitRequest:
    """Return the training that is to be submitted, checked as `paceline train` would."""
    from paceline.cli.asked import Asked
    from paceline.cli.config_file import read_config
    from paceline.tasks.names import resolve

    if config is not None and options.on == KUBERNETES:
        raise InputError("--config names a file that no container has. Give its options on the command line.")
    file, chosen = read_config(config), settings(set_)
    workers = workers_of({**file, **given}, options.gpus_per_node)
    said: dict[str, Any] = {**given} if workers is None else {**given, "workers": workers}
    # What is resumed on Kubernetes is in a volume there, where the pods look at it.
    resume = options.on == KUBERNETES and said.pop("resume", False)
    typed, asked = Asked.for_command(
        "submit",
        task,
        file,
        said | ({"settings": chosen} if chosen else {}) | ({} if threads is None else {"threads": threads}),
    )
    for text in asked.notes:
        print(f"note: {text}", file=sys.stderr)  # noqa: T201
    _check_settings(typed, asked.spec, options.on)
    words = arguments(said, chosen, threads)
    if config is not None:
        words = (*words, "--config", str(config.absolute()))
    place = typed.partition(":")[0]
    absolute = place.endswith(".py") and options.on != KUBERNETES
    return SubmitRequest(
        task=resolve(typed)[0] if absolute else typed,
        arguments=words,
        options=replace(asked.options, resume=True) if resume else asked.options,
        submit=options,
        threads=None if asked.threads is None else ranges.THREADS.read("--threads", asked.threads),
    )

"""`paceline train`: train a task with any strategy on any number of workers."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.generated import Given, takes
from paceline.cli.options import TASK, AsJson, Config, Settings, Threads, settings
from paceline.cli.outcome import print_json, report, report_error
from paceline.cli.starting import AUTO, SSH, Hosts, On, Resources, SshCommand, start_elsewhere
from paceline.errors import InputError, WorkerFailedError
from paceline.launch.clusters.ssh import meeting
from paceline.strategies.tuning import Tuning
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec
from paceline.world import env

if TYPE_CHECKING:
    from paceline.cli.asked import Asked


@takes(RunOptions, Tuning, TrainSpec)
def train(
    given: Given,
    task: Annotated[str | None, typer.Argument(help=TASK)] = None,
    roles: Annotated[
        str | None,
        typer.Option(help="trainers=2,servers=1: the same as --strategy ps --workers 2 --servers 1."),
    ] = None,
    set_: Settings = None,
    config: Config = None,
    threads: Threads = None,
    on: On = AUTO,
    hosts: Hosts = None,
    ssh: SshCommand = SSH,
    resources: Resources = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")
    ] = False,
    json_: AsJson = False,
) -> int:
    """Train a task: the same answer on one process, on threads or on many processes."""
    from paceline.cli.asked import Asked
    from paceline.cli.config_file import read_config
    from paceline.launch import api
    from paceline.launch.console import Console
    from paceline.observe.progress import open_progress

    file = read_config(config)
    # A run that is resumed may have had other machines.
    machines = {name: value for name, value in meeting(hosts).items() if name not in file}
    given = {**_of_roles(roles, given), **machines, **given}
    given |= {"settings": settings(set_)} if set_ else {}
    given |= {"threads": threads} if threads is not None else {}
    task, asked = Asked.for_command("train", task, file, given)
    for text in asked.notes:
        print(f"note: {text}", file=sys.stderr)  # noqa: T201
    elsewhere = start_elsewhere(
        asked.options,
        on=on,
        hosts=hosts,
        ssh=ssh,
        resources=resources,
        given=given,
        dry_run=dry_run,
    )
    if elsewhere is not None:
        return elsewhere
    if dry_run:
        return _describe(asked)
    outcome = api.start(
        *_call(asked),
        threads=asked.threads,
        console=Console(open_progress()),
        record={**asked.spec.record(), "threads": asked.threads},
    )
    status = report(outcome)
    if outcome.led_by is not None:
        show_follower(outcome.led_by, asked.options.workers, as_json=json_)
    elif outcome.results and outcome.failure is None and _speaks():
        launched = {"restarts": outcome.restarts, "errors": [asdict(one) for one in outcome.errors]}
        show({**outcome.results[0], **launched}, typed=task, as_json=json_)
    return status


def _call(asked: Asked) -> tuple[Any, ...]:
    """Return what the workers are to do, as a launcher takes it."""
    from paceline.launch import api

    return api.TRAINER, (asked.spec,), {}, asked.options


def _describe(asked: Asked) -> int:
    """Print what would be started, once for a world that is there already; return the exit status."""
    from paceline.launch import api
    from paceline.launch.workers.read_shards import ReadShards

    launcher = api.choose()
    plan = api.plan(launcher, *_call(asked), threads=asked.threads)
    try:
        launcher.ask(ReadShards(asked.spec))  # a run would refuse what it raises
    except WorkerFailedError as error:
        return report_error(error)
    if _speaks():
        print(plan.describe())  # noqa: T201
    return 0


def _speaks() -> bool:
    """Return whether this process prints what is of all workers: in a world that is there already, rank 0."""
    identity = env.identity()
    return identity is None or identity.rank == 0


def _of_roles(text: str | None, given: Given) -> Given:
    """Return what --roles stands for."""
    if text is None:
        return {}
    from paceline.remote.names import Roles

    sizes = dict(Roles.parse(text).sizes)
    if sizes.keys() != {"trainers", "servers"}:
        raise InputError(
            f"--roles {text}: training has trainers and servers. Give both, like trainers=2,servers=1."
        )
    if given.keys() & {"workers", "servers"}:
        raise InputError(
            "--roles says how many workers and servers there are. Leave --workers and --servers out."
        )
    return {"strategy": "ps", "workers": sizes["trainers"], "servers": sizes["servers"]}


def show(result: dict[str, Any], *, typed: str, as_json: bool) -> None:
    """Print the result for a program or for a person; `typed` is TASK as the command line had it."""
    if as_json:
        print_json(result)
        return
    from paceline.observe.summary import show as show_summary

    show_summary({**result, "typed": typed}, sys.stdout)


def show_follower(leader: str, workers: int, *, as_json: bool) -> None:
    """Report, on a machine that another one led, that the run is done; the result is printed there."""
    if as_json:
        print_json({"led_by": leader, "workers": workers})
    else:
        print(f"the run is done; {leader} has the result.")  # noqa: T201

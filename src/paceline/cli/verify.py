"""`paceline verify`: prove on the user's own task or script that several workers compute what one process computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli.generated import Given, takes
from paceline.cli.options import TASK, AsJson, Config, Settings, Threads, settings
from paceline.cli.outcome import report_error, show_report
from paceline.errors import InputError, WorkerFailedError
from paceline.option_fields import flag
from paceline.strategies import several
from paceline.strategies.tuning import Tuning
from paceline.tasks.names import resolve
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec
from paceline.verify.proof.asked import STEPS, WITHOUT_EFFECT, request_of
from paceline.verify.proof.request import VerifyRequest


@takes(
    RunOptions,
    Tuning,
    TrainSpec,
    words={
        "shards": "Logical shards of a global batch, in all runs. Default: two numbers are tried, the largest of "
        "--workers, then the task's or twice as many.",
        "exact": "Verify the runs at this level. Default: the strategy's own.",
    },
    hidden=WITHOUT_EFFECT,
)
def verify(
    context: typer.Context,
    given: Given,
    task: Annotated[str | None, typer.Argument(help=TASK)] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help=f"Strategies to verify, with commas between. Default: {','.join(VerifyRequest.strategies)}."
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help="Numbers of workers to verify, with commas between. "
            f"Default: {','.join(map(str, VerifyRequest.workers))}."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help=f"Steps to compare. Default: {STEPS}.")] = None,
    set_: Settings = None,
    config: Config = None,
    script: Annotated[
        str | None,
        typer.Option(help="Verify a script of your own instead: --script train.py -n 2 -- ITS ARGUMENTS."),
    ] = None,
    number: Annotated[int, typer.Option("-n", help="Workers for --script.")] = 2,
    receipt: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Verify a run that is recorded in DIR: repeat its first --steps, or the steps --from a checkpoint to the next.",
        ),
    ] = None,
    from_: Annotated[
        int | None, typer.Option("--from", metavar="STEP", help="For --receipt: the checkpoint to begin at.")
    ] = None,
    hash_seed: Annotated[
        bool, typer.Option(help="Also repeat the first steps in a fresh process with another hash seed.")
    ] = VerifyRequest.hash_seed,
    resume: Annotated[
        bool,
        typer.Option(help="Also save in mid-run and resume with another strategy or number of workers."),
    ] = VerifyRequest.resume,
    threads: Threads = None,
    json_: AsJson = False,
) -> int:
    """Compare runs with one process, step by step and bit by bit; name the cause where they differ."""
    from paceline.cli.config_file import read_config

    own = {"strategy": strategy, "workers": workers, "steps": steps}
    said = {name: value for name, value in own.items() if value is not None}
    odd = next((name for name in given if name != "device"), None)
    if odd is not None and (receipt is not None or script is not None):
        raise InputError(
            f"{flag(odd)} is an option for verifying a TASK: a receipt holds the options of its run, and a "
            "script sets its own. Leave it out."
        )
    if receipt is not None and (task is not None or script is not None or context.args):
        raise InputError("--receipt DIR says what is verified: give neither a TASK nor --script with it.")
    try:
        if receipt is not None:
            device = given.get("device", RunOptions.device)
            return _receipt(receipt, said, start=from_, threads=threads, device=device, as_json=json_)
        if script is not None:
            # Behind `--` the first argument of the script lands where a task would be.
            arguments = ([task] if task is not None else []) + context.args
            return _script(script, arguments, workers=number, threads=threads, as_json=json_)
        file = read_config(config)
        task = task if task is not None else file.pop("task", None)
        if task is None or context.args:
            extra = f", not also {' '.join(context.args)}" if context.args else ""
            raise InputError(f"give one TASK to verify, or --script SCRIPT{extra}.")
        return _task(
            task,
            {**file, **given, **said, "settings": {**file.get("settings", {}), **settings(set_)}},
            as_json=json_,
            threads=threads if threads is not None else file.get("threads"),
            hash_seed=hash_seed,
            resume=resume,
        )
    except WorkerFailedError as error:
        return report_error(error)


def _task(
    task: str,
    said: Given,
    *,
    as_json: bool,
    **options: Any,
) -> int:
    from paceline.verify.proof.check import verify as check

    reference, name = resolve(task)
    idle = [flag(one) for one in WITHOUT_EFFECT if one in said]
    if idle:
        print(f"note: {', '.join(idle)}: without effect here.", file=sys.stderr)  # noqa: T201
    request = request_of(
        said,
        task=reference,
        name=name,
        strategies=several(said["strategy"]) if "strategy" in said else VerifyRequest.strategies,
        workers=_numbers(str(said["workers"])) if "workers" in said else VerifyRequest.workers,
        **options,
    )
    with _progress() as progress:
        report = check(request, progress)
    return show_report(report, as_json=as_json)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being run, on a line of its own."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("verifying") as status:
        yield lambda text: status.update(f"verifying: {text}")


def _script(script: str, arguments: list[str], *, workers: int, threads: int | None, as_json: bool) -> int:
    from paceline.verify.script.check import ScriptRequest, verify_script

    request = ScriptRequest(script=script, arguments=arguments, workers=workers, threads=threads)
    return show_report(verify_script(request), as_json=as_json)


def _receipt(folder: Path, said: dict[str, Any], *, as_json: bool, **options: Any) -> int:
    from paceline.verify.receipts.rerun import SegmentReplay, verify_receipt

    workers = _numbers(said["workers"]) if "workers" in said else (None,)
    if len(workers) > 1:
        raise InputError("--receipt re-runs on one number of workers. Give --workers 2, say.")
    replay = SegmentReplay(
        folder=folder,
        steps=said.get("steps"),
        strategy=said.get("strategy"),
        workers=workers[0],
        **options,
    )
    return show_report(verify_receipt(replay), as_json=as_json)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part.encode("ascii")) for part in text.split(","))
    except ValueError:
        raise InputError(f"--workers {text!r} is no list of numbers, such as 1,2,4.") from None

"""`paceline verify`: prove on the user's own task or script that several workers compute what one process computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli import tuning
from paceline.cli.options import (
    AsJson,
    Backend,
    BatchSize,
    Clip,
    Compile,
    Device,
    Epochs,
    Horizon,
    LoaderWorkers,
    MicroBatch,
    Precision,
    Seed,
    Servers,
    Settings,
    SharedMemoryChannel,
    SyncBatchnorm,
    Threads,
)
from paceline.cli.outcome import print_json
from paceline.cli.outcome import report as report_failure
from paceline.cli.reference import resolve
from paceline.cli.train import setting
from paceline.errors import InputError, WorkerFailedError
from paceline.launch.base import Outcome
from paceline.launch.failures import Failure
from paceline.strategies import several


def verify(
    context: typer.Context,
    task: Annotated[
        str | None,
        typer.Argument(help="A built-in task (see `paceline tasks`), path.py:Class or package.module:Class."),
    ] = None,
    strategy: Annotated[str, typer.Option(help="Strategies to verify, with commas between.")] = "ddp,dp",
    workers: Annotated[str, typer.Option(help="Numbers of workers to verify, with commas between.")] = "1,2",
    steps: Annotated[int, typer.Option(help="Steps to compare.")] = 20,
    shards: Annotated[
        int | None,
        typer.Option(
            help="Logical shards of a global batch, for all runs. Default: the most workers, then the task's or twice as many."
        ),
    ] = None,
    exact: Annotated[
        str | None, typer.Option(help="Verify the runs at this level. Default: the strategy's own.")
    ] = None,
    epochs: Epochs = None,
    horizon: Horizon = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    precision: Precision = None,
    compile_: Compile = False,
    sync_batchnorm: SyncBatchnorm = False,
    micro_batch: MicroBatch = None,
    clip: Clip = None,
    loader_workers: LoaderWorkers = None,
    servers: Servers = None,
    backend: Backend = "auto",
    lane: SharedMemoryChannel = None,
    set_: Settings = None,
    script: Annotated[
        str | None,
        typer.Option(help="Verify a script of your own instead: --script train.py -n 2 -- ITS ARGUMENTS."),
    ] = None,
    number: Annotated[int, typer.Option("-n", help="Workers for --script.")] = 2,
    receipt: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Verify a run that is recorded in DIR: take its first --steps again, or those --from a checkpoint to the next.",
        ),
    ] = None,
    from_: Annotated[
        int | None, typer.Option("--from", metavar="STEP", help="For --receipt: the checkpoint to begin at.")
    ] = None,
    hash_seed: Annotated[
        bool, typer.Option(help="Also take the first steps in a fresh process with another hash seed.")
    ] = True,
    resume: Annotated[
        bool,
        typer.Option(help="Also save in mid-run and resume with another strategy or number of workers."),
    ] = True,
    threads: Threads = None,
    device: Device = "auto",
    recompute: tuning.Recompute = None,
    recompute_every: tuning.RecomputeEvery = None,
    shard_optimizer: tuning.ShardOptimizer = None,
    offload: tuning.Offload = None,
    reshard: tuning.Reshard = None,
    gather: tuning.Gather = None,
    compress: tuning.Compress = None,
    bucket_mb: tuning.BucketMb = None,
    schedule: tuning.Schedule = None,
    stages_a_worker: tuning.StagesAWorker = None,
    sequence_parallel: tuning.SequenceParallel = None,
    loss_parallel: tuning.LossParallel = None,
    local_steps: tuning.LocalSteps = None,
    local_warmup: tuning.LocalWarmup = None,
    outer: tuning.Outer = None,
    outer_lr: tuning.OuterLr = None,
    outer_momentum: tuning.OuterMomentum = None,
    staleness: tuning.Staleness = None,
    json_: AsJson = False,
) -> int:
    """Compare runs with one process, step by step and bit by bit; name the cause where they part."""
    tuned: dict[str, Any] = {
        "recompute": recompute,
        "recompute_every": recompute_every,
        "shard_optimizer": shard_optimizer,
        "offload": offload,
        "reshard": reshard,
        "gather": gather,
        "compress": compress,
        "bucket_mb": bucket_mb,
        "schedule": schedule,
        "stages_a_worker": stages_a_worker,
        "sequence_parallel": sequence_parallel,
        "loss_parallel": loss_parallel,
        "local_steps": local_steps,
        "local_warmup": local_warmup,
        "outer": outer,
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "staleness": staleness,
    }
    said_of_task = {
        "seed": seed,
        "precision": precision,
        "micro_batch": micro_batch,
        "loader_workers": loader_workers,
    }
    odd = next((name for name, value in tuned.items() if value is not None), None)
    if odd is not None and (receipt is not None or script is not None):
        raise InputError(
            f"--{odd.replace('_', '-')} tunes the strategies that a TASK is verified with: a receipt knows what its run was "
            "tuned by, and a script tunes itself. Leave it out."
        )
    if receipt is not None:
        if task is not None or script is not None or context.args:
            raise InputError("--receipt DIR says what is verified: give neither a TASK nor --script with it.")
        said = {name: value for name, value in context.params.items() if _was_given(context, name)}
        return _receipt(receipt, said, start=from_, threads=threads, device=device, as_json=json_)
    if script is None and (task is None or context.args):
        extra = f", not also {' '.join(context.args)}" if context.args else ""
        raise InputError(f"give one TASK to verify, or --script SCRIPT{extra}.")
    try:
        if script is not None:
            # Behind `--` the first argument of the script lands where a task would be.
            arguments = ([task] if task is not None else []) + context.args
            return _script(script, arguments, workers=number, threads=threads, as_json=json_)
        return _task(
            task or "",
            as_json=json_,
            said={
                "settings": dict(setting(text) for text in set_ or []),
                "steps": steps,
                "horizon": horizon,
                "batch_size": batch_size,
                "clip": clip,
                "overrides": {name: value for name, value in said_of_task.items() if value is not None},
            },
            strategies=several(strategy),
            workers=_numbers(workers),
            shards=shards,
            exact=exact,
            device=device,
            threads=threads,
            hash_seed=hash_seed,
            resume=resume,
            epochs=epochs,
            servers=servers,
            compile=compile_,
            sync_batchnorm=sync_batchnorm,
            backend=backend,
            lane=lane or "auto",
            tuning=tuning.said_for(several(strategy), tuned),
        )
    except WorkerFailedError as error:
        return _failed(error)


def _task(task: str, *, as_json: bool, said: dict[str, Any], **options: Any) -> int:
    from paceline.training.spec import TrainSpec
    from paceline.verify.check import verify as check
    from paceline.verify.request import Request
    from paceline.verify.table import render

    reference, name = resolve(task)
    with _progress() as progress:
        report = check(Request(spec=TrainSpec(task=reference, name=name, **said), **options), progress)
    return _end(report.as_json(), render(report), holds=report.holds, as_json=as_json)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show what is being run on a line of its own, where somebody looks on."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("verifying") as status:
        yield lambda text: status.update(f"verifying: {text}")


def _script(script: str, arguments: list[str], *, workers: int, threads: int | None, as_json: bool) -> int:
    from paceline.verify.script.check import ScriptRequest, verify_script

    request = ScriptRequest(script=script, arguments=arguments, workers=workers, threads=threads)
    report = verify_script(request)
    return _end(report.as_json(), report.render(), holds=report.holds, as_json=as_json)


def _receipt(folder: Path, said: dict[str, Any], *, as_json: bool, **options: Any) -> int:
    from paceline.verify.receipt import Replay, verify_receipt

    workers = _numbers(said["workers"]) if "workers" in said else (None,)
    if len(workers) > 1:
        raise InputError("--receipt re-runs on one number of workers. Give --workers 2, say.")
    try:
        report = verify_receipt(
            Replay(
                folder=folder,
                steps=said.get("steps"),
                strategy=said.get("strategy"),
                workers=workers[0],
                **options,
            )
        )
    except WorkerFailedError as error:
        return _failed(error)
    return _end(report.as_json(), "\n".join(report.lines()), holds=report.holds, as_json=as_json)


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _failed(error: WorkerFailedError) -> int:
    """Show a failure of the user's own code as `paceline train` does: its traceback, last."""
    failure = Failure(rank=error.rank, host=error.host, kind="code", message=error.cause, trace=error.trace)
    return report_failure(Outcome(results=(), failure=failure))


def _end(plain: dict[str, Any], shown: Any, *, holds: bool, as_json: bool) -> int:
    if as_json:
        print_json(plain)
    else:
        Console(highlight=False).print(shown, soft_wrap=True)  # a sentence stays one line, to be searched for
    return 0 if holds else 1


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--workers {text!r} is no list of numbers, such as 1,2,4.") from None

"""`paceline train`: train a task with any strategy on any number of workers."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import tuning
from paceline.cli.folders import new_folder
from paceline.cli.options import (
    AsJson,
    Backend,
    BatchSize,
    Clip,
    Compile,
    Device,
    Epochs,
    Horizon,
    JoinTimeout,
    LoaderWorkers,
    MachineTimeout,
    MicroBatch,
    Nodes,
    Precision,
    Rendezvous,
    Seed,
    Servers,
    Settings,
    SharedMemoryChannel,
    SyncBatchnorm,
    Threads,
    folder_option,
)
from paceline.cli.outcome import print_json, report
from paceline.cli.reference import resolve
from paceline.errors import InputError
from paceline.strategies import STRATEGIES
from paceline.strategies.tuning import Tuning
from paceline.world import env

_STRATEGIES = "; ".join(f"{name}: {entry.description}" for name, entry in STRATEGIES.items())


def train(
    task: Annotated[
        str,
        typer.Argument(help="A built-in task (see `paceline tasks`), path.py:Class or package.module:Class."),
    ],
    strategy: Annotated[
        str | None,
        typer.Option(help=f"{_STRATEGIES}. Or a mesh: ddp=2,fsdp=2; fsdp,tp=2; ddp=2,pp=2. Default: ddp."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes on each machine; for dp the threads of its one process. Default: the mesh's, or 1."
        ),
    ] = None,
    servers: Servers = None,
    roles: Annotated[
        str | None,
        typer.Option(help="trainers=2,servers=1: the same as --strategy ps --workers 2 --servers 1."),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            help="Logical shards of a global batch, fixed for the life of a run: the bits depend on it, as on the seed, "
            "and on nothing else of the layout. Default: the task's; one per worker where it has none."
        ),
    ] = None,
    exact: Annotated[
        str | None,
        typer.Option(help="bitwise, numeric or statistical; more than the strategy can give is an error."),
    ] = None,
    epochs: Epochs = None,
    steps: Annotated[
        int | None, typer.Option(help="End after this step, counted from the beginning of the run.")
    ] = None,
    horizon: Horizon = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    precision: Precision = None,
    compile_: Compile = False,
    sync_batchnorm: SyncBatchnorm = False,
    micro_batch: MicroBatch = None,
    clip: Clip = None,
    loader_workers: LoaderWorkers = None,
    save_every: Annotated[
        str | None, typer.Option(help="Checkpoint every so many steps (100) or epochs (1epoch).")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="How many checkpoints are kept. Default: 3.")
    ] = None,
    save_async: Annotated[
        bool,
        typer.Option("--save-async", help="Go on training while a checkpoint is written."),
    ] = False,
    peer_copies: Annotated[
        int | None,
        typer.Option(
            help="Other workers that keep a copy of each worker's part of a sharded state (0 or 1). Default: 0."
        ),
    ] = None,
    copy_every: Annotated[
        int | None, typer.Option(help="Steps between two such copies. Default: 10.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the run in --out, with any strategy and number of workers."
        ),
    ] = False,
    out: Annotated[Path | None, folder_option("The run folder. Default: runs/TASK-TIME.")] = None,
    set_: Settings = None,
    threads: Threads = None,
    device: Device = "auto",
    backend: Backend = "auto",
    lane: SharedMemoryChannel = None,
    check_collectives: Annotated[
        bool,
        typer.Option(
            "--check-collectives", help="Compare every collective between ranks first; slow, for debugging."
        ),
    ] = False,
    elastic: Annotated[
        bool,
        typer.Option(
            help="Survive lost workers: the others regroup and go on. --no-elastic ends the run instead."
        ),
    ] = True,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            help="Workers started in place of lost ones; one more is allowed after each minute. Default: 10."
        ),
    ] = None,
    min_workers: Annotated[
        int | None, typer.Option(help="Go on with fewer workers down to this many. Default: 1.")
    ] = None,
    hang_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds without progress until a worker is replaced. Default: 60, or 10 long steps."
        ),
    ] = None,
    rebalance: Annotated[
        bool, typer.Option("--rebalance", help="Give slower workers fewer shards; the bits stay.")
    ] = False,
    nodes: Nodes = "1",
    rendezvous: Rendezvous = None,
    join_timeout: JoinTimeout = 600.0,
    machine_timeout: MachineTimeout = 15,
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
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events into the run folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")
    ] = False,
    json_: AsJson = False,
) -> int:
    """Train a task: the same answer on one process, on threads or on many processes."""
    from paceline.cli import resumed
    from paceline.launch import api
    from paceline.launch.console import Console
    from paceline.observe.progress import open_progress
    from paceline.training import folder
    from paceline.training.options import RunOptions
    from paceline.training.spec import TrainSpec

    if resume and out is None:
        raise InputError("--resume needs the folder of the run to resume. Give --out.")
    before = folder.read_spec(out) if resume and out is not None else {}
    kept = before.get("options", {})
    threads = threads if threads is not None else before.get("threads")
    reference, name = resolve(task)
    said = {
        "seed": seed,
        "precision": precision,
        "micro_batch": micro_batch,
        "loader_workers": loader_workers,
    }
    overrides = before.get("overrides", {}) | {key: value for key, value in said.items() if value is not None}
    if roles is not None:
        strategy, workers, servers = _of_roles(roles, strategy, workers, servers)
    layout = resumed.lay_out(
        kept, strategy=strategy, workers=workers, servers=servers, shards=shards, nodes=nodes
    )
    tuned, unused = resumed.usable(layout.strategy, kept.get("tuning", {}))
    for text in (*layout.notes, *unused):
        print(f"note: {text}", file=sys.stderr)  # noqa: T201
    options = RunOptions(
        strategy=layout.strategy,
        servers=layout.servers,
        workers=layout.workers,
        tuning=Tuning(
            **tuning.given(
                layout.strategy,
                tuned,
                recompute=recompute,
                recompute_every=recompute_every,
                shard_optimizer=shard_optimizer,
                offload=offload,
                reshard=reshard,
                gather=gather,
                compress=compress,
                bucket_mb=bucket_mb,
                schedule=schedule,
                stages_a_worker=stages_a_worker,
                sequence_parallel=sequence_parallel,
                loss_parallel=loss_parallel,
                local_steps=local_steps,
                local_warmup=local_warmup,
                outer=outer,
                outer_lr=outer_lr,
                outer_momentum=outer_momentum,
                staleness=staleness,
            )
        ),
        save_async=save_async or kept.get("save_async", False),
        peer_copies=peer_copies if peer_copies is not None else kept.get("peer_copies", 0),
        copy_every=copy_every if copy_every is not None else kept.get("copy_every", 10),
        shards=shards,
        exact=exact if exact is not None else kept.get("exact"),
        compile=compile_ or kept.get("compile", False),
        sync_batchnorm=sync_batchnorm or kept.get("sync_batchnorm", False),
        device=device,
        backend=backend,
        lane=lane if lane is not None else kept.get("lane", "auto"),
        check_collectives=check_collectives,
        out=out if out is not None else new_folder(name),
        save_every=save_every if save_every is not None else kept.get("save_every"),
        keep=keep if keep is not None else kept.get("keep", 3),
        resume=resume,
        tensorboard=tensorboard or kept.get("tensorboard", False),
        elastic=elastic,
        max_restarts=max_restarts if max_restarts is not None else kept.get("max_restarts", 10),
        min_workers=min_workers if min_workers is not None else 1,
        hang_timeout=hang_timeout if hang_timeout is not None else kept.get("hang_timeout", 60.0),
        rebalance=rebalance or kept.get("rebalance", False),
        nodes=nodes,
        rendezvous=rendezvous,
        join_timeout=join_timeout,
        machine_timeout=machine_timeout,
        **overrides,
    )
    ends = {"epochs": epochs, "steps": steps}
    if epochs is None and steps is None:
        ends = {key: before.get(key) for key in ends}
    spec = TrainSpec(
        task=reference,
        name=name,
        settings=before.get("settings", {}) | dict(setting(text) for text in set_ or []),
        batch_size=batch_size if batch_size is not None else before.get("batch_size"),
        horizon=horizon if horizon is not None else before.get("horizon"),
        clip=clip if clip is not None else before.get("clip"),
        overrides=overrides,
        **ends,
    )
    call: tuple[Any, ...] = (api.TRAINER, (spec,), {}, options)
    if dry_run:
        print(api.plan(api.choose(), *call, threads=threads).describe())  # noqa: T201
        return 0
    outcome = api.start(
        *call, threads=threads, console=Console(open_progress()), record={**asdict(spec), "threads": threads}
    )
    status = report(outcome)
    identity = env.identity()
    if outcome.led_by is not None:
        show_follower(outcome.led_by, options.workers, as_json=json_)
    elif outcome.results and outcome.failure is None and (identity is None or identity.rank == 0):
        launched = {"restarts": outcome.restarts, "errors": [asdict(one) for one in outcome.errors]}
        show({**outcome.results[0], **launched}, typed=task, as_json=json_)
    return status


def _of_roles(
    text: str, strategy: str | None, workers: int | None, servers: int | None
) -> tuple[str, int, int]:
    """Read --roles as what it stands for."""
    from paceline.remote.names import Roles

    sizes = dict(Roles.parse(text).sizes)
    if sizes.keys() != {"trainers", "servers"}:
        raise InputError(
            f"--roles {text}: training has trainers and servers. Give both, like trainers=2,servers=1."
        )
    if workers is not None or servers is not None:
        raise InputError(
            "--roles says how many workers and servers there are. Leave --workers and --servers out."
        )
    return strategy or "ps", sizes["trainers"], sizes["servers"]


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


def setting(text: str) -> tuple[str, str]:
    """Read one KEY=VALUE of --set."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {text!r} is not KEY=VALUE, such as --set lr=0.001.")
    return key.strip(), value.strip()

"""`paceline.launch`: run a function of the user's on several workers, from Python."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Unpack

from paceline import ranges, strategies
from paceline.compat import python
from paceline.errors import InputError, WorkerFailedError
from paceline.launch import job
from paceline.launch.base import Launcher, LaunchPlan, LaunchSpec, Outcome
from paceline.launch.clean_up import check_call
from paceline.launch.clusters import entering
from paceline.launch.clusters.joined import JoinedLauncher
from paceline.launch.clusters.mpi import MpiLauncher
from paceline.launch.clusters.slurm import SlurmLauncher
from paceline.launch.console import Console
from paceline.launch.in_python import errors_in_keywords, in_keywords, run_options, signature
from paceline.launch.keywords import LaunchOptions
from paceline.launch.local import LocalLauncher
from paceline.launch.nodes import machines
from paceline.launch.policy import Policy
from paceline.launch.workers.process_limit import check_process_limit
from paceline.launch.workers.read_shards import ReadShards
from paceline.observe.events import Note
from paceline.remote import reach
from paceline.training import folder
from paceline.training.options import OPTION, TASK, WORKERS, RunOptions
from paceline.training.script import check_importing
from paceline.training.spec import TrainSpec
from paceline.world import env

TRAINER = "paceline.training.trainer:main"
"""What trains a Task."""


def launch(
    function: Callable[..., Any],
    *args: Any,
    threads: int | None = None,
    kwargs: dict[str, Any] | None = None,
    **options: Unpack[LaunchOptions],
) -> tuple[Any, ...]:
    """Call `function(run, *args)` on each of `workers` workers and return what each returned, by rank.

    `options` are those of `paceline train`, by their names in Python: shards=4, precision="bf16", save_every=50, nodes=2,
    resume=True, and those of single strategies: local_steps=8, shard_optimizer=True. `inspect.signature` shows all of them.
    With resume=True every option that is not given is as the run had it.
    Started by torchrun, mpirun or srun (or any launcher that sets RANK and WORLD_SIZE), this process is one of the workers
    already: the function is called here, in that world, and `workers` does not count.
    """
    check_importing()
    with errors_in_keywords(), entering.entered(rendezvous=options.get("rendezvous")):
        made, before, notes = run_options(options)
        folder.check_resumed(made)
        threads = threads if threads is not None else before.get("threads")
        console, identity = Console(notes=True), env.identity()
        if identity is None and job.is_in_script(function):
            check_call(python.frame(1))
        for text in notes if identity is None or identity.rank == 0 else ():
            console.event(Note(in_keywords(text)))
        outcome = start(
            function, args, kwargs or {}, made, threads=threads, console=console, record={"threads": threads}
        )
        if outcome.interrupted == signal.SIGTERM:
            console.line(in_keywords(outcome.farewell))  # else this process would end without a word
        return outcome.value()


launch.__signature__ = signature(launch)  # type: ignore[attr-defined]


def start(
    function: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RunOptions,
    *,
    threads: int | None = None,
    console: Console | None = None,
    record: dict[str, Any] | None = None,
) -> Outcome:
    """Launch with the launcher for this process, and wait for the end; `record` goes into spec.json, over the options."""
    launcher = choose(console)
    return launcher.launch(plan(launcher, function, args, kwargs, options, threads=threads, record=record))


def choose(console: Console | None = None) -> Launcher:
    """Return the launcher for this process: of the world that it was started in, or of this machine."""
    launchers: tuple[Launcher, ...] = (
        MpiLauncher(),
        SlurmLauncher(),
        JoinedLauncher(),
        LocalLauncher(console),
    )
    return next(one for one in launchers if one.detect())


def plan(
    launcher: Launcher,
    function: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RunOptions,
    *,
    threads: int | None = None,
    record: dict[str, Any] | None = None,
) -> LaunchPlan:
    """Return what would be started."""
    options = launcher.adopt(options)
    if threads is not None:
        threads = ranges.THREADS.read("--threads", threads)
    rendezvous = machines.meeting(
        options.rendezvous,
        str(options.nodes),
        join_timeout=options.join_timeout,
        machine_timeout=options.machine_timeout,
        lead=options.lead,
    )
    if rendezvous is None or rendezvous.is_here():
        folder.check(options)  # one that follows may well come to a run in progress
    spec = next((one for one in args if isinstance(one, TrainSpec)), None)
    # Before a worker is asked for the shards, of which a limit would speak first.
    check_process_limit(options.workers + options.total_servers, threads or 1, options.num_workers)
    options = choose_shards(options, lambda: task_shards(spec, launcher))
    if rendezvous is not None and options.total_servers:
        reach.chosen(machines.interface(rendezvous))
    # One shard's share of the cores, not one worker's: the bits of a sum depend on how many threads took it.
    threads = max(1, env.cores() // options.total_shards) if threads is None else threads
    check_process_limit(options.workers + options.total_servers, threads, options.num_workers)
    call = job.function_call(function, args, kwargs, asdict(options))
    payloads = [call.payload, *([spec.shipped] if spec is not None and spec.shipped is not None else [])]
    codes = [one.fingerprint for one in payloads if one.sources]
    facts = {**(record or {}), **({"code": " ".join(codes)} if codes else {})}
    return launcher.plan(
        LaunchSpec(
            call=call,
            workers=options.processes,
            threads=threads,
            out=options.out,
            modules=_modules(function, options),
            record={"options": asdict(options), **(record or {})},
            policy=Policy(
                workers=options.processes,
                shards=options.total_shards,
                elastic=options.elastic,
                trains=function == TRAINER,
                # Statistics over all workers need one shard on each: a lost one is waited for.
                min_workers=options.total_shards
                if options.sync_batchnorm
                else min(
                    options.min_workers, (options.processes - options.total_servers) * options.max_nodes
                ),
                max_restarts=options.max_restarts,
                hang_timeout=options.hang_timeout,
                rebalance=options.rebalance,
                choice=options.choice,
            ),
            grace=options.grace,
            rendezvous=rendezvous,
            secret_file=options.secret_file,
            agreed=machines.agreed(function, options, facts) if rendezvous is not None else {},
        )
    )


def _modules(function: Callable[..., Any] | str, options: RunOptions) -> tuple[str, ...]:
    """Return what the workers of a run import beyond torch itself, and of ours: imported once, or in every one of them."""
    needed = [*strategies.entry(options.strategy).imports]
    needed += [function.partition(":")[0]] if isinstance(function, str) else ()
    needed += strategies.SHARDED_OPTIMIZER if options.tuning.shard_optimizer else ()
    needed += ("paceline.compat.compiler",) if options.tuning.activation_checkpointing != "none" else ()
    needed += ("paceline.compat.compiler_ahead",) if options.compile else ()
    return tuple(dict.fromkeys(needed))


def task_shards(spec: TrainSpec | None, launcher: Launcher | None = None) -> int | None:
    """Return the shards that a task asks for; None where it leaves them to the workers, or its own code fails.

    That code says why in the workers, which make the task again. Raise InputError where its settings cannot be.
    """
    if spec is None:
        return None
    try:
        found: int | None = (launcher or choose()).ask(ReadShards(spec))
    except WorkerFailedError:
        return None
    return found


def choose_shards(options: RunOptions, ask: Callable[[], int | None]) -> RunOptions:
    """Fix the number of shards: as the command line has it, as the run being resumed, as the task (`ask`), or one per worker."""
    if options.shards is not None:
        return options
    if options.resume and options.out is not None:
        before = folder.read_spec(options.out).get("options", {})
        shards, workers = before.get("shards"), options.workers * options.max_nodes
        if shards is not None and workers > shards:
            raise InputError(
                f"the run in {options.out} has {shards} shards, so at most {shards} workers can share it, "
                f"not {workers}."
            )
        if shards is not None:
            return replace(options, shards=shards, shards_from=before.get("shards_from", OPTION))
    asked = ask()
    if asked is not None:
        return replace(options, shards=asked, shards_from=TASK)
    return replace(options, shards=options.total_shards, shards_from=WORKERS)

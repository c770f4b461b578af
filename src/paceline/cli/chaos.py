"""`paceline chaos`: disturb a training on purpose, and show that its answer is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.generated import Given, takes
from paceline.cli.options import TASK, AsJson, Settings, Threads, folder_option, new_folder, settings
from paceline.cli.outcome import report, report_error, show_report
from paceline.errors import InputError, WorkerFailedError
from paceline.tasks.names import resolve
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec
from paceline.verify.chaos.faults import KINDS
from paceline.verify.chaos.plan import STEPS_PER_FAULT, USUAL_POINTS, PlanRequest

_KINDS = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())


@takes(
    RunOptions,
    TrainSpec,
    only=("strategy", "device", "batch_size"),
    words={"strategy": f"A strategy of several processes. Default: {RunOptions.strategy}."},
)
def chaos(
    given: Given,
    task: Annotated[str, typer.Argument(help=TASK)],
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 4,
    faults: Annotated[int, typer.Option(help="How many faults to set off.")] = 20,
    kinds: Annotated[str, typer.Option(help=f"Kinds of faults, with commas between. {_KINDS}.")] = ",".join(
        KINDS
    ),
    points: Annotated[
        str,
        typer.Option(
            help="Where they go off, with commas between. With evaluation, too, for a task that measures."
        ),
    ] = ",".join(USUAL_POINTS),
    seed: Annotated[int, typer.Option(help="Which faults, when and where; not the task's own seed.")] = (
        PlanRequest.seed
    ),
    assert_same: Annotated[
        bool, typer.Option("--assert-same", help="Fail if the weights are not those of the undisturbed run.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help=f"Steps of each run. Default: {STEPS_PER_FAULT} per fault.")
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            help="Logical shards of a global batch. Default: the task's; one per worker where it has none."
        ),
    ] = None,
    hang_timeout: Annotated[
        float, typer.Option(help="Seconds without progress after which a worker counts as hung.")
    ] = PlanRequest.hang_timeout,
    out: Annotated[
        Path | None, folder_option("The folder for both runs. Default: runs/TASK-chaos-TIME.")
    ] = None,
    set_: Settings = None,
    threads: Threads = None,
    json_: AsJson = False,
) -> int:
    """Kill, stop and slow down workers, fill the disk, end the launcher; then compare with a run in which nothing happened."""
    from paceline.launch import api
    from paceline.observe.progress import open_progress
    from paceline.verify.chaos.trial import ChaosRequest
    from paceline.verify.chaos.trial import chaos as run_chaos

    reference, name = resolve(task)
    total = steps if steps is not None else STEPS_PER_FAULT * (max(1, faults) + 2)
    spec = TrainSpec(
        task=reference,
        name=name,
        settings=settings(set_),
        steps=total,
        batch_size=given.get("batch_size"),
    )
    request = ChaosRequest(
        spec=spec,
        folder=out or new_folder(f"{name}-chaos"),
        plan=PlanRequest(
            faults=faults,
            steps=total,
            workers=workers,
            shards=shards if shards is not None else workers,
            seed=seed,
            kinds=_names(kinds),
            points=_names(points),
            hang_timeout=hang_timeout,
        ),
        **{name: given[name] for name in ("strategy", "device") if name in given},
        threads=threads,
        assert_same=assert_same,
    )
    if shards is None and (asked := api.task_shards(spec)) is not None:
        request = replace(request, plan=replace(request.plan, shards=asked))
    try:
        found, outcome = run_chaos(request, open_progress)
    except WorkerFailedError as error:
        return report_error(error)
    status = show_report(found, as_json=json_)
    return report(outcome) or status


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise InputError("--kinds and --points are names with commas between, such as --kinds kill,slow.")
    return names

"""`paceline cancel`: end a job that was submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import AsJson
from paceline.cli.outcome import print_json


def cancel(
    run: Annotated[Path, typer.Argument(help="The run folder (--out) of a submitted job.")],
    now: Annotated[
        bool,
        typer.Option("--now", help="Let SLURM end it at once, instead of after its step with a checkpoint."),
    ] = False,
    json_: AsJson = False,
) -> int:
    """End a submitted job: one that trains saves a checkpoint first, and is not queued again."""
    from paceline.launch.submit import record, slurm

    _, job = record.read(run)
    before = slurm.cancel(job, now=now)
    if json_:
        print_json({"run": str(run), "job": job, "was": before.state, "cancelled": not before.over})
    else:
        over = f"job {job} is over already ({before.state})"
        print(over if before.over else f"job {job} was {before.state} and is told to end")  # noqa: T201
    return 0

"""`paceline status`: what became of a job that was submitted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import AsJson
from paceline.cli.outcome import print_json

if TYPE_CHECKING:
    from paceline.launch.submit.progress import Progress
    from paceline.launch.submit.slurm import JobState


def status(
    run: Annotated[Path, typer.Argument(help="The run folder (--out) of a submitted job.")],
    json_: AsJson = False,
) -> int:
    """Show what SLURM says of a submitted job, and how far its run is."""
    from paceline.launch.submit import record, slurm
    from paceline.launch.submit.progress import read_progress

    _, job = record.read(run)
    found, progress = slurm.state(job), read_progress(run)
    if json_:
        print_json({"run": str(run), "job": job, **asdict(found), **asdict(progress)})
    else:
        print(f"{run}: {_of_job(job, found)}; {_of_run(progress)}.")  # noqa: T201
    return 0


def _of_job(job: str, found: JobState) -> str:
    from paceline.launch.submit.slurm import FORGOTTEN

    if found.state == FORGOTTEN:
        return f"job {job} has ended so long ago that SLURM no longer knows it"
    words = [f"job {job} is {found.state}"]
    if found.state == "PENDING":
        words += [f"({found.reason})"] if found.reason else []
    else:
        words += [f"on {found.nodes}"] if found.nodes else []
        words += [f"for {found.run_time} of {found.time_limit}"]
    words += [f"after it was queued again {found.restarts} time(s)"] if found.restarts else []
    return " ".join(words)


def _of_run(progress: Progress) -> str:
    ends = {"run_finished": "the run is done", "run_failed": "the run has failed"}
    words = [ends[progress.ended]] if progress.ended else []
    words += ["no step is done"] if progress.step is None else [f"step {progress.step} is done"]
    words += (
        ["nothing is saved"]
        if progress.saved is None
        else [f"the newest checkpoint is of step {progress.saved}"]
    )
    return ", ".join(words)

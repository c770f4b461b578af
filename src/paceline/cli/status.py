"""`paceline status`: how far a run is, and what became of its job where it was submitted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import AsJson
from paceline.cli.outcome import print_json
from paceline.errors import InputError

if TYPE_CHECKING:
    from paceline.launch.submit.progress import RunProgress
    from paceline.launch.submit.slurm import JobState

_ENDS = {"run_finished": ("COMPLETED", "the run is done"), "run_failed": ("FAILED", "the run has failed")}
"""How a run ends, by its last event: in SLURM's word for it, and in a sentence."""


def status(
    run: Annotated[Path, typer.Argument(help="The run folder (--out).")],
    json_: AsJson = False,
) -> int:
    """Show how far a run is, whoever started it, and what SLURM says of its job where it was submitted."""
    from paceline.launch.submit import record, slurm
    from paceline.launch.submit.progress import read_progress

    progress = read_progress(run)
    if record.find(run) is None:
        return _show_run(run, progress, as_json=json_)
    _, job = record.read(run)
    found = slurm.state(job)
    if json_:
        print_json({"run": str(run), "job": job, **asdict(found), **asdict(progress)})
    else:
        print(f"{run}: {_of_job(job, found)}; {_of_run(progress)}.")  # noqa: T201
    return 0


def _show_run(run: Path, progress: RunProgress, *, as_json: bool) -> int:
    """Show a run that was not submitted, by what its folder says."""
    from paceline.launch.control import in_progress
    from paceline.training.folder import EVENTS, SPEC

    if not any((run / name).exists() for name in (SPEC, EVENTS)):
        raise InputError(
            f"{run} holds no run, and no job was submitted for it. Give the --out folder of one."
        )
    launcher = in_progress(run)
    if launcher is not None:
        state, words = "RUNNING", f"in progress on {launcher.get('host')}; {_of_run(progress)}"
    elif progress.ended is not None:
        state, words = _ENDS[progress.ended][0], _of_run(progress)
    else:
        state, words = "STOPPED", f"not in progress, and not done; {_of_run(progress)}"
    if as_json:
        print_json({"run": str(run), "job": None, "state": state, **asdict(progress)})
    else:
        print(f"{run}: {words}.")  # noqa: T201
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


def _of_run(progress: RunProgress) -> str:
    words = [_ENDS[progress.ended][1]] if progress.ended else []
    words += ["no step is done"] if progress.step is None else [f"step {progress.step} is done"]
    words += (
        ["nothing is saved"]
        if progress.saved is None
        else [f"the newest checkpoint is of step {progress.saved}"]
    )
    return ", ".join(words)

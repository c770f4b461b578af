"""Submits a job to SLURM, and asks what became of it. Imports no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from paceline.errors import InputError
from paceline.launch.submit import beginning, record
from paceline.launch.submit.batch_script import LOGS, SECRET, batch_script
from paceline.launch.submit.options import SLURM
from paceline.launch.submit.record import JobRecord
from paceline.launch.submit.request import SubmitRequest
from paceline.transport.secret import Secret

SCRIPT = "job.sh"
TIMEOUT_S = 60.0
OVER = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"),
)
"""States out of which a job does not come by itself; PREEMPTED ones that are queued again are PENDING."""
FORGOTTEN = "FORGOTTEN"
"""What is said of a job that SLURM no longer knows: it ended some minutes ago, or more."""
_NEVER_BEGUN = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


class RefusedError(InputError):
    """Raised where SLURM says no, so that nothing was done."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What SLURM says of a job."""

    state: str
    reason: str = ""
    run_time: str = ""
    time_limit: str = ""
    nodes: str = ""
    restarts: int = 0
    """How often it was queued again."""

    @property
    def over(self) -> bool:
        """Whether it has ended for good."""
        return self.state in (*OVER, FORGOTTEN)


def script(request: SubmitRequest, extra: tuple[str, ...] = ()) -> str:
    """Return the batch script of a job."""
    out = request.out.absolute()
    moved = replace(request, options=replace(request.options, out=out))
    return batch_script(moved, python=sys.executable, folder=Path.cwd(), extra=_checked(extra))


def submit(request: SubmitRequest, extra: tuple[str, ...] = ()) -> JobRecord:
    """Write the script into the run folder and submit it, once; return the job."""
    text, out = script(request, extra), request.out
    _program("sbatch")
    before = record.find(out)
    if before is not None:
        _retire(out, before)
    made = [one for one in (out, *out.parents) if not one.exists()]
    (out / LOGS).mkdir(parents=True, exist_ok=True)
    job = JobRecord(on=SLURM, name=request.name)
    job.claim(out)
    try:
        (out / SCRIPT).write_text(text)
        if request.nodes[1] > 1:
            _write_secret(out / SECRET)
        (out / beginning.NAME).unlink(missing_ok=True)  # of a job that is over
    except BaseException:
        _take_back(out, made)
        raise
    try:  # Ctrl-C leaves the record as it is, too: there may be a job
        said = _run("sbatch", "--parsable", str(out / SCRIPT))
    except RefusedError:
        _take_back(out, made)
        raise
    except InputError as error:
        raise InputError(f"{error} {record.what_to_do(out, job)}") from None
    number = said.strip().rpartition("\n")[2].partition(";")[0]  # a plugin may have printed before it
    if not record.is_number(number):
        raise InputError(
            f"sbatch gave no number of a job, but {number[:80]!r}. {record.what_to_do(out, job)}"
        )
    job = replace(job, id=number)
    job.write(out)
    return job


def state(job: str) -> JobState:
    """Ask SLURM for the state of a job."""
    try:
        said = _run("scontrol", "--oneliner", "show", "job", job)
    except InputError as error:
        if "Invalid job id" in str(error):
            return JobState(state=FORGOTTEN)
        raise
    # The first of a name counts: paths, which come last, may hold others.
    found = dict(word.partition("=")[::2] for word in reversed(said.split()))
    restarts = found.get("Restarts", "")
    return JobState(
        state=found.get("JobState", FORGOTTEN),
        reason=found.get("Reason", "").replace("None", ""),
        run_time=found.get("RunTime", ""),
        time_limit=found.get("TimeLimit", ""),
        nodes=found.get("NodeList", "").replace("(null)", ""),
        restarts=int(restarts) if restarts.isdecimal() else 0,
    )


def cancel(job: str, *, now: bool = False) -> JobState:
    """End a job, one that trains after its step and with a checkpoint unless it is to go `now`; return what it was before."""
    before = state(job)
    if before.over:
        return before
    if now or before.state in _NEVER_BEGUN:
        _run("scancel", job)
    else:
        _run("scancel", "--batch", "--signal=USR2", job)
    return before


def _retire(out: Path, before: JobRecord) -> None:
    """Make room for another job of a run, where the one before is over."""
    if before.id is None:
        raise record.unfinished(out, before)
    found = state(before.id)
    if not found.over:
        raise InputError(
            f"{out} was submitted already: job {before.id} is {found.state}. `paceline status {quote(str(out))}` shows it, "
            f"`paceline cancel {quote(str(out))}` ends it."
        )
    before.retire(out)


def _write_secret(path: Path) -> None:
    """Make a secret that only this user may read, unless there is one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        Secret.read(path)  # raises where others may read it
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(Secret.make().text + "\n")


def _take_back(out: Path, made: Sequence[Path]) -> None:
    """Remove what was written for a job that there is not, and the folders that were made for it."""
    for name in (record.NAME, SCRIPT, SECRET):
        (out / name).unlink(missing_ok=True)
    for place in (out / LOGS, *made):
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def _checked(extra: tuple[str, ...]) -> tuple[str, ...]:
    for one in extra:
        if not one.startswith("-") or not one.isprintable():
            raise InputError(
                f"--sbatch {one!r} is no option of sbatch. Give one with its value: --sbatch=--constraint=h100."
            )
    return extra


def _run(*command: str) -> str:
    """Run a command of SLURM's and return what it prints; raise InputError with its own words where it fails."""
    program = _program(command[0])
    try:
        ended = subprocess.run(
            [program, *command[1:]],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{command[0]} does not answer within {TIMEOUT_S:g} s. Is SLURM's controller up?"
        ) from None
    if ended.returncode != 0:
        words = " ".join((ended.stderr or ended.stdout).split())
        # One that was killed, or whose wait for the controller timed out, may have been heard.
        heard = ended.returncode < 0 or "timed out" in words
        raise (InputError if heard else RefusedError)(
            f"{command[0]} failed: {words or f'exit status {ended.returncode}'}"
        )
    return ended.stdout


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise InputError(
            f"there is no {name} here, so this machine has no SLURM. Submit where it is; --dry-run prints the job."
        )
    return found

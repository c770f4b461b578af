"""A worker's life: from the moment it is forked to the exit status it leaves."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import time
from multiprocessing.connection import Connection

import torch

from paceline.compat import pickles
from paceline.compat.parent_death import die_with_parent
from paceline.compat.python import end_interpreter
from paceline.launch import failures
from paceline.launch.job import Job
from paceline.launch.workers.context import UNFINISHED, Worker, is_between_steps, step_of
from paceline.recovery.membership import LeaveRunError
from paceline.world import env, stacks
from paceline.world.status_page import NoStatusPage, StatusPage

END_NOW = signal.SIGRTMIN
"""By which a launcher ends a worker that takes SIGTERM for a notice: no signal that a user or a batch system sends."""
HOLD_S = 0.5
"""How long a worker that is to join keeps still first: the others are just forming their group, and need the cores."""


def run(
    parent: int,
    payload: int,
    out: int,
    err: int,
    control: int,
    events: int | None = None,
    page: int | None = None,
    shown: int | None = None,
) -> int:
    """Do the job found in `payload` and return the exit status.

    `events` is where its events go, `page` the memory in which this worker shows what it is at, `shown` the
    file that its stacks are written to on request.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, _end_quietly)
    signal.signal(END_NOW, _end_quietly)
    for source, target in ((out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    gc.unfreeze()
    with os.fdopen(payload, "rb") as file:
        file.seek(0)
        job: Job = pickle.load(file)  # noqa: S301  (made by this user's own launcher)
    _take_on(job)
    if job.newcomer:
        time.sleep(HOLD_S)
    launcher = Connection(control)  # never closed here: a thread may listen on it to the end
    worker = Worker(
        identity=job.identity,
        newcomer=job.newcomer,
        starts=job.starts,
        launcher=launcher,
        status_page=_open_status_page(page, shown),
        events=events,
    )
    status = _attempt(job, worker, launcher)
    end_interpreter()
    return status


def _open_status_page(page: int | None, shown: int | None) -> NoStatusPage:
    if page is None or shown is None:
        return NoStatusPage()
    stacks.register(shown)
    status_page = StatusPage(page)
    os.close(page)
    stacks.attend(status_page)
    return status_page


def _end_quietly(*_: object) -> None:
    # The launcher asked; whatever is in flight (a collective, a C++ call) must not delay the end.
    os._exit(128 + signal.SIGTERM)


def _take_on(job: Job) -> None:
    """Take on the launcher's environment, folder and path, and this worker's identity."""
    env.replace({**job.environment, **job.identity.variables(), **job.variables})
    os.chdir(job.folder)
    sys.path[:] = job.search_path
    job.neighbours.adopt()
    sys.argv[:] = job.arguments
    torch.set_num_threads(job.threads)


def _attempt(job: Job, worker: Worker, launcher: Connection) -> int:
    """Make the call and report its value or its failure."""
    rank = job.identity.rank
    try:
        value = job.call(worker)
        message = pickles.dumps(("result", value))
    except LeaveRunError:
        return 0
    except SystemExit as error:
        if error.code in (None, 0) and not vars(error).get(UNFINISHED):
            launcher.send_bytes(pickle.dumps(("result", None)))
            return 0
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)  # noqa: T201  (as the interpreter does)
        launcher.send_bytes(
            pickle.dumps(("failure", failures.from_status(status, rank, env.host(), step_of(error))))
        )
        return status
    except BaseException as error:  # noqa: BLE001  (reported to the launcher, which shows it)
        between = is_between_steps(error)
        failure = failures.from_exception(error, rank, env.host(), step_of(error), between=between)
        launcher.send_bytes(pickle.dumps(("failure", failure)))
        return failure.status
    launcher.send_bytes(message)
    return 0

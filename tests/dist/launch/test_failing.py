"""A worker that fails: the first cause comes out, by rank and host, with the worker's own traceback."""

import ctypes
import os
import signal
import socket
import sys
import tempfile
import threading
import time

import pytest
import torch

import paceline
from paceline.errors import WorkerFailedError


@pytest.fixture(autouse=True)
def logs_below(tmp_path, monkeypatch):
    """Keep the logs of failed launches out of the machine's own temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def failure_of(function, *args, workers=2):
    with pytest.raises(WorkerFailedError) as caught:
        paceline.launch(function, *args, workers=workers)
    assert caught.value.host == socket.gethostname()
    assert f"rank {caught.value.rank} on {caught.value.host} " in str(caught.value)
    return caught.value


def raise_on(run, rank):
    if run.world.rank == rank:
        raise ValueError("the reason")
    run.world.comm.all_reduce(torch.ones(1))


@pytest.mark.parametrize("rank", [0, 2])
def test_the_exception_of_one_rank_is_the_cause_though_others_then_lose_their_peer(rank):
    failure = failure_of(raise_on, rank, workers=3)
    assert failure.rank == rank
    assert failure.cause == "failed"
    assert failure.__notes__ == [failure.trace.rstrip()]
    assert failure.trace.startswith("Traceback (most recent call last):\n")
    assert failure.trace.endswith("ValueError: the reason\n")
    assert "in raise_on" in failure.trace
    assert "paceline/launch" not in failure.trace


def slow_to_tell(run):
    if run.world.rank == 1:
        run.world.close()
        time.sleep(1)
        raise ValueError("the reason")
    run.world.comm.all_reduce(torch.ones(1))


def test_the_cause_is_waited_for_when_its_echo_comes_first():
    failure = failure_of(slow_to_tell)
    assert (failure.rank, failure.trace.splitlines()[-1]) == (1, "ValueError: the reason")


def end_by(run, how):
    if run.world.rank == 1:
        how_to_end[how]()
    run.world.comm.all_reduce(torch.ones(1))


how_to_end = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGABRT": os.abort,
    "exit 3": lambda: sys.exit(3),
    "exit text": lambda: sys.exit("a last word"),
    "os._exit 4": lambda: os._exit(4),
}


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("SIGKILL", "was killed by SIGKILL"),
        ("SIGSEGV", "was killed by SIGSEGV"),
        ("SIGABRT", "was killed by SIGABRT"),
        ("exit 3", "exited with status 3"),
        ("exit text", "exited with status 1"),
        ("os._exit 4", "exited with status 4"),
    ],
)
def test_a_worker_that_ends_before_its_time_is_reported_as_such(how, cause, tmp_path):
    failure = failure_of(end_by, how)
    assert (failure.rank, failure.cause) == (1, cause)
    (log,) = tmp_path.glob("paceline-*/logs/rank-1.log")
    assert ("a last word" in log.read_text()) == (how == "exit text")
    assert ("in end_by" in log.read_text()) == (how in ("SIGSEGV", "SIGABRT"))


def leave_early(run):
    sys.exit(0)


def test_exit_status_zero_is_no_failure():
    assert paceline.launch(leave_early, workers=2) == (None, None)


def refuse(run):
    raise paceline.InputError("not like this. Do that.")


def test_bad_input_found_in_a_worker_is_bad_input_here():
    with pytest.raises(paceline.InputError, match=r"^not like this\. Do that\.$"):
        paceline.launch(refuse, workers=2)


def result_that_cannot_travel(run):
    return threading.Lock()


def test_a_result_that_cannot_travel_is_a_failure():
    assert "cannot pickle" in failure_of(result_that_cannot_travel).trace


class OddError(Exception):
    def __init__(self, left, right):
        super().__init__(f"{left} is not {right}")


def raise_odd(run):
    raise OddError(1, 2)


def test_an_exception_that_cannot_be_pickled_still_arrives():
    assert failure_of(raise_odd).trace.endswith("OddError: 1 is not 2\n")


def test_the_logs_of_a_failed_launch_are_kept_and_named(tmp_path, capsys):
    failure_of(raise_on, 1)
    (folder,) = tmp_path.glob("paceline-*")
    assert f"the output of every rank is in {folder / 'logs'}" in capsys.readouterr().err
    assert "ValueError: the reason" in (folder / "logs" / "rank-1.log").read_text()


def test_a_launch_that_went_well_leaves_nothing(tmp_path):
    paceline.launch(leave_early, workers=2)
    assert list(tmp_path.iterdir()) == []


def ask_torch(run):
    return torch.distributed.get_rank(), run.world.comm.all_reduce(torch.ones(1)).item()


def test_a_process_group_that_one_worker_has_not_is_told_of():
    assert paceline.launch(ask_torch, workers=2) == ((0, 2.0), (1, 2.0))
    assert "Use run.world.comm (all_reduce" in failure_of(ask_torch, workers=1).trace

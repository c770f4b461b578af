"""The worker pool of the tests itself: what fails in a worker fails here, and nothing stays behind."""

import os
import signal

import pytest

from paceline.errors import WorkerFailedError
from tests.workers import run_workers


def fail_on_one(world):
    if world.rank == 1:
        raise ValueError("the reason")


def die_on_one(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_failure_is_raised_with_its_traceback():
    with pytest.raises(WorkerFailedError, match=r"rank 1 on .* failed") as caught:
        run_workers(fail_on_one, 2)
    assert "in fail_on_one" in caught.value.trace
    assert "ValueError: the reason" in caught.value.trace


def test_a_death_is_raised():
    with pytest.raises(WorkerFailedError, match=r"rank 1 on .* was killed by SIGKILL"):
        run_workers(die_on_one, 2)

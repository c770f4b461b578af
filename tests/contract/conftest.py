"""One launch of one process and one of each case, for all tests of the suite."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.jobs import HALF, JOBS, WHOLE, Job
from tests.contract.strategies import CASES, Case
from tests.contract.training import Trained, train


@dataclass(frozen=True)
class Compared:
    """A case, what it made of every job, and what one process did."""

    case: Case
    one: dict[str, Trained]
    many: dict[str, Trained]
    out: Path
    """Where the case left a run halfway."""


@pytest.fixture(scope="session")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of a run that one process is to leave halfway."""
    return tmp_path_factory.mktemp("contract") / "halfway"


@pytest.fixture(scope="session")
def one(halfway: Path) -> dict[str, Trained]:
    """Give what one process makes of every job."""
    return train({**JOBS, "whole": WHOLE, "half": into(HALF, halfway)})


@pytest.fixture(scope="session", params=CASES, ids=str)
def compared(
    request: pytest.FixtureRequest,
    one: dict[str, Trained],
    halfway: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Compared:
    """Give what a strategy makes of the same jobs, and of the run that one process left halfway."""
    case = request.param
    home = tmp_path_factory.mktemp("case")
    shutil.copytree(halfway, home / "taken up")
    more = {"resumed": into(WHOLE, home / "taken up", resume=True), "half": into(HALF, home / "left")}
    many = train({**JOBS, **more}, case.strategy, case.workers, **case.options)
    return Compared(case, one, many, home / "left")


def into(job: Job, folder: Path, **options: Any) -> Job:
    """Give the job with a run folder."""
    return replace(job, options={**job.options, "out": folder, **options})

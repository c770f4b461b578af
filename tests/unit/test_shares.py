"""Every slow test is in one share, and a share with the quick tests takes less than twelve minutes on two cores."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import shares

ROOT = Path(__file__).parents[2]
CONFTEST = """
from pathlib import Path
from tests import shares
from tests.shares import pytest_addoption, pytest_configure
shares.TIMES = Path(__file__).with_name("times.json")
shares.SLOW_S, shares.PREPARED_S = 0.1, 0.2
"""
TESTS = """
import time, pytest

@pytest.mark.parametrize("number", range(9))
def test_slow(number):
    time.sleep(0.15)

def test_quick():
    pass
"""
PREPARED = """
import time, pytest

@pytest.fixture(scope="module")
def prepared():
    time.sleep(0.3)

def test_one(prepared):
    pass

def test_other(prepared):
    pass
"""


def test_a_share_takes_less_than_twelve_minutes_on_two_cores() -> None:
    taken = json.loads(shares.TIMES.read_text())
    seconds: Counter[int] = Counter()
    for name, share in shares.dealt(taken["slow"]).items():
        seconds[share] += taken["slow"][name]
    assert set(seconds) == set(range(1, shares.SHARES + 1))
    assert (taken["quick"] + max(seconds.values())) / 2 < 12 * 60


def pytest_in(folder: Path, *options: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in (("conftest", CONFTEST), ("test_a", TESTS), ("test_prepared", PREPARED)):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "pytest.ini").touch()
    return tmp_path


def test_every_slow_test_is_run_in_one_share_and_every_quick_one_in_all(project: Path) -> None:
    assert pytest_in(project, "--write-times")[0] == 0
    ran: Counter[str] = Counter()
    with_prepared = []
    for share in range(1, shares.SHARES + 1):
        status, told = pytest_in(project, "--share", str(share))
        assert status == 0, told
        assert f"share {share} of {shares.SHARES} (again: pytest --share {share})" in told
        names = re.findall(r"::(\S+) PASSED", told)
        ran.update(names)
        with_prepared.append([name for name in names if name in {"test_one", "test_other"}])
    assert ran.pop("test_quick") == shares.SHARES
    assert set(ran.values()) == {1}
    assert len(ran) == 9 + 2
    assert sorted(map(len, with_prepared)) == [0] * (shares.SHARES - 1) + [2]  # they share what is prepared


@pytest.mark.parametrize(
    "options",
    [
        ["--share", "0"],
        ["--share", str(shares.SHARES + 1)],
        ["--share", "x"],
        ["--share", "1", "--write-times"],
    ],
)
def test_a_share_that_is_not_there_is_refused(project: Path, options: list[str]) -> None:
    status, told = pytest_in(project, *options)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert re.search(r"ERROR: .*(give 1 to \d+, or commit|leave out --share)", told), told

"""The slow tests in shares: `make test` takes one, another with each commit, and every quick test; `make test-all` all."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TIMES = Path(__file__).with_name("times.json")
"""How long the slow tests took, and all quick ones together, when everything was last run with `--write-times`."""

SHARES = 12
SLOW_S = 1.0
PREPARED_S = 10.0
"""A file with a test that was prepared for longer is dealt out whole: its other tests would be prepared anew in each share."""


def dealt(slow: dict[str, float]) -> dict[str, int]:
    """Return which share each slow test is in: all shares take about equally long."""
    full = [0.0] * SHARES
    shares = {}
    for name in sorted(slow, key=lambda name: (-slow[name], name)):
        share = full.index(min(full))
        full[share] += slow[name]
        shares[name] = share + 1
    return shares


def commit() -> str:
    """Return the commit that is checked out, or nothing outside a repository."""
    told = subprocess.run(
        ["git", "rev-parse", "HEAD"],  # noqa: S607
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip()


class Shares:
    """Leaves the slow tests of other shares out of a run, and measures how long each test takes."""

    def __init__(self, config: pytest.Config) -> None:
        self.share = chosen(config.getoption("--share"))
        self.writes = config.getoption("--write-times")
        if self.writes and self.share:
            raise pytest.UsageError("--write-times measures every test: leave out --share")
        self.took: Counter[str] = Counter()
        self.prepared: set[str] = set()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave the slow tests of the other shares out."""
        if not self.share:
            return
        shares = dealt(json.loads(TIMES.read_text())["slow"])
        kept, others = [], []
        for item in items:
            share = shares.get(item.nodeid) or shares.get(file_of(item.nodeid)) or self.share
            (kept if share == self.share else others).append(item)
        items[:] = kept
        config.hook.pytest_deselected(items=others)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up what it took to set up, run and clean up a test."""
        self.took[report.nodeid] += report.duration
        if report.when == "setup" and report.duration >= PREPARED_S:
            self.prepared.add(file_of(report.nodeid))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say which tests were left out, and how to run them."""
        if self.share:
            terminalreporter.write_line(
                f"Of the slow tests this was share {self.share} of {SHARES} "
                f"(again: pytest --share {self.share}); make test-all runs every one."
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write down what each slow test took."""
        if self.writes and not hasattr(session.config, "workerinput"):
            TIMES.write_text(record(self.took, self.prepared))


def chosen(asked: str | None) -> int:
    """Return which share was asked for; 0 is everything."""
    if asked is None:
        return 0
    if asked == "commit":
        return 1 + int(commit()[:8] or "0", 16) % SHARES
    if asked.isdecimal() and 1 <= int(asked) <= SHARES:
        return int(asked)
    raise pytest.UsageError(f"--share {asked}: there are {SHARES} shares; give 1 to {SHARES}, or commit")


def file_of(name: str) -> str:
    """Return the file that a test is in."""
    return name.partition("::")[0]


def record(took: dict[str, float], prepared: set[str]) -> str:
    """Return what `times.json` says of tests that took so long; a file in which much was `prepared` for tests stays whole."""
    sums: Counter[str] = Counter()
    for name, seconds in took.items():
        sums[file_of(name) if file_of(name) in prepared else name] += seconds
    slow = {name: round(seconds, 1) for name, seconds in sorted(sums.items()) if seconds >= SLOW_S}
    quick = round(sum(seconds for name, seconds in sums.items() if name not in slow), 1)
    return json.dumps({"quick": quick, "slow": slow}, indent=1) + "\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what chooses the share."""
    parser.addoption(
        "--share",
        metavar="commit|N",
        help=f"run the quick tests and one share of the slow: 1 to {SHARES}, or by the commit",
    )
    parser.addoption(
        "--write-times", action="store_true", help=f"write down which tests are slow into {TIMES.name}"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Watch over what is run."""
    config.pluginmanager.register(Shares(config))

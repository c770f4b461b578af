"""Runs parts of the zoo at the same time, each in a process with workers of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.zoo.cells import Cell, Verdict


def run_in_parts(cells: list[Cell], jobs: int) -> dict[str, Verdict]:
    """Run cells in so many processes; those of one layout stay together."""
    parts: list[list[Cell]] = [[] for _ in range(jobs)]
    layouts = dict.fromkeys(cell.layout for cell in cells)
    for layout in sorted(layouts, key=lambda one: (one.shards, -one.workers)):
        mine = [cell for cell in cells if cell.layout == layout]
        min(parts, key=_cost).extend(mine)
    with ThreadPoolExecutor(jobs) as pool:
        made = list(pool.map(_run, [part for part in parts if part]))
    return {name: Verdict.parse(text) for one in made for name, text in one.items()}


def _cost(part: list[Cell]) -> int:
    return sum(cell.layout.workers for cell in part)


def _run(part: list[Cell]) -> dict[str, str]:
    names = [argument for cell in part for argument in ("--cell", cell.name)]
    told = subprocess.run(
        [sys.executable, "-m", "tests.zoo", "--json", *names], stdout=subprocess.PIPE, text=True, check=False
    )
    if not told.stdout.strip():
        raise RuntimeError(f"a part of the zoo ended with status {told.returncode} and no result")
    verdicts: dict[str, str] = json.loads(told.stdout.splitlines()[-1])
    return verdicts

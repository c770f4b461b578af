"""A soak: seeded faults of all kinds under several strategies, and the bits of a run in which nothing happened.

    python benchmarks/soak.py [--faults 50] [--strategies ddp,fsdp,...] [--seeds 0] [--workers 4] [--shards 6]
        [--task digits] [--write]

Each strategy and seed is one chaos run of --faults faults with its own undisturbed run, one after the other. The
result holds, for each run, what `paceline chaos --json` gives, with the faults counted by point in place of the plan, and what
processes, shared memory and temporary folders were left behind. Ends with status 1 where anything is not well. A stopped
worker is noticed by its silence alone, so 50 faults take some three minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.launch.workers import fork_server
from paceline.observe.progress import open_progress
from paceline.strategies import choice, load, several
from paceline.strategies.base import Exactness
from paceline.strategies.tuning import Tuning
from paceline.tasks.names import resolve
from paceline.training.spec import TrainSpec
from paceline.verify.chaos.plan import STEPS_PER_FAULT, PlanRequest
from paceline.verify.chaos.trial import ChaosRequest, chaos
from paceline.world import env

RESULT = Path(__file__).with_name("results") / "soak.json"


STRATEGIES = "ddp,fsdp,ddp=2,fsdp=2,pp,ddp=2,tp=2,ps"
"""Sides with sizes that follow each other are one mesh, so a name stands between the two."""


def kept() -> set[str]:
    """Return what a run could leave behind: processes of this one, shared memory, folders of ours."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    folders = [*Path("/dev/shm").iterdir(), *Path(tempfile.gettempdir()).glob("paceline-*")]  # noqa: S108
    return {*(f"process {pid}" for pid in children), *map(str, folders)}


def soak(options: argparse.Namespace, strategy: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run one seed of a strategy and return its numbers."""
    reference, name = resolve(options.task)
    steps = STEPS_PER_FAULT * (options.faults + 2)
    request = ChaosRequest(
        spec=TrainSpec(task=reference, name=name, steps=steps),
        folder=folder,
        plan=PlanRequest(
            faults=options.faults, steps=steps, workers=options.workers, shards=options.shards, seed=seed
        ),
        strategy=strategy,
        device="cpu",
        # tp is numeric: a rescue on fewer workers adds its parts up in another order.
        assert_same=load(choice(strategy).name).level(Tuning()) is Exactness.BITWISE,
    )
    report, outcome = chaos(request, open_progress)
    Console(highlight=False).print(report.render(), soft_wrap=True)
    if outcome.failure is not None:
        print(outcome.failure.trace or outcome.failure.message)
    told = report.as_json()
    # The plan follows from the seed, and a folder that is gone helps nobody.
    del told["plan"], told["out"]
    told["points"] = dict(sorted(Counter(one.fault.point for one in report.injected).items()))
    return told


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--strategies", default=STRATEGIES, help="names and meshes, with commas between")
    parser.add_argument("--seeds", default="0", help="with commas between")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--write", action="store_true", help="write the result beside this script")
    options = parser.parse_args()
    runs = []
    for strategy, seed in itertools.product(several(options.strategies), map(int, options.seeds.split(","))):
        before = kept()
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            run = soak(options, strategy, seed, Path(folder) / "out")
        fork_server.shared().close()
        run["left_behind"] = sorted(kept() - before)
        run["holds"] = run["holds"] and not run["left_behind"]
        runs.append(run)
    totals = {
        key: sum(run[key] for run in runs)
        for key in ("faults", "injected", "recovered", "lost", "repeated", "steps_redone")
    }
    result = {
        "about": {"python": platform.python_version(), "cores": env.cores()},
        "holds": all(run["holds"] for run in runs),
        **totals,
        "runs": runs,
    }
    if options.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())

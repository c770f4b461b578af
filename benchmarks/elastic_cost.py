"""What it costs to be elastic while nothing happens: the step time against --no-elastic, and against no watching at all.

    python benchmarks/elastic_cost.py [--rounds 30] [--workers 2,3] [--write]

All contenders live in the same workers and take turns, a block of steps each:
  unwatched    no launcher looks at the worker: no status page, no elasticity
  no-elastic   --no-elastic: the launcher sees what the worker is at
  elastic      the default: it also listens for changes of the group
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from models import CASES
from step_overhead import interleave, ours, show, summarise

import paceline
from paceline.training.run import engine_of
from paceline.world.status_page import NoStatusPage

RESULT = Path(__file__).with_name("results") / "elastic_cost.json"


def contenders(run: paceline.Run, name: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    case = CASES[name]
    fixed = replace(engine_of(run).state.options, elastic=False)
    made = {
        "unwatched": ours(case, paceline.Run(replace(run.world, status_page=NoStatusPage()), fixed)),
        "no-elastic": ours(case, paceline.Run(run.world, fixed)),
        "elastic": ours(case, run),
    }
    return interleave(run, made, case.steps, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workers", default="2,3")
    parser.add_argument("--cases", default="linear,mlp,gpt")
    parser.add_argument("--write", action="store_true", help="write the result beside this script")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for workers in map(int, options.workers.split(",")):
        for name in options.cases.split(","):
            seen = paceline.launch(contenders, name, options.rounds, workers=workers, threads=1, device="cpu")
            title = f"{name}, {workers} workers"
            results[title] = summarise(seen[0], against="no-elastic")
            show(title, results[title])
    if options.write:
        about = {"torch": torch.__version__, "rounds": options.rounds}
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps({"about": about, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

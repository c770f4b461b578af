"""From the command line to the first optimizer step: paceline against torchrun, on the same plain DDP script.

    python benchmarks/startup.py [--rounds 5] [--workers 2,4] [--write]

The contenders take turns; each ratio is taken within a round.
  torchrun        torchrun --standalone --nproc-per-node N startup_script.py
  paceline run    paceline run -n N startup_script.py
  paceline train  paceline train dense4096 --workers N, up to its first step's event
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "startup.json"
BIN = Path(sys.executable).absolute().parent


def timed(command: list[str], mark: Path) -> float:
    """Give the seconds from the start of a command to the moment written into `mark`."""
    started = time.time()
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tempfile.gettempdir()
    )
    if mark.suffix == ".jsonl":
        events = (json.loads(line) for line in mark.read_text().splitlines())
        return next(event["time"] for event in events if event["kind"] == "step") - started
    return float(mark.read_text()) - started


def contenders(workers: int, folder: Path) -> dict[str, tuple[list[str], Path]]:
    script, mark, run = str(HERE / "startup_script.py"), folder / "mark", folder / "run"
    return {
        "torchrun": (
            [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={workers}", script, str(mark)],
            mark,
        ),
        "paceline run": ([str(BIN / "paceline"), "run", "-n", str(workers), script, str(mark)], mark),
        "paceline train": (
            [
                str(BIN / "paceline"),
                "train",
                "dense4096",
                "--workers",
                str(workers),
                "--steps",
                "1",
                "--out",
                str(run),
            ],
            run / "events.jsonl",
        ),
    }


def measure(workers: int, rounds: int) -> dict[str, dict[str, float]]:
    seen: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name in contenders(workers, Path()):
            with tempfile.TemporaryDirectory() as folder:
                seconds = timed(*contenders(workers, Path(folder))[name])
            if number > 0:  # the first round warms the disk cache
                seen.setdefault(name, []).append(seconds)
    return {
        name: {
            "seconds": round(statistics.median(values), 3),
            "ratio": round(
                statistics.median(a / b for a, b in zip(values, seen["torchrun"], strict=True)), 3
            ),
        }
        for name, values in seen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--write", action="store_true", help="write the result beside this script")
    options = parser.parse_args()
    results = {}
    for workers in map(int, options.workers.split(",")):
        results[f"{workers} workers"] = measure(workers, options.rounds)
        print(f"\n{workers} workers: to the first step, the median of {options.rounds} rounds")
        for name, row in results[f"{workers} workers"].items():
            print(f"  {name:15} {row['seconds']:6.2f} s  {row['ratio']:5.2f} of torchrun")
    if options.write:
        about = {"torch": torch.__version__, "rounds": options.rounds}
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps({"about": about, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

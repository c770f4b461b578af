"""SIGKILL of one of 3 workers, to the next finished step: paceline against torchrun with the usual checkpoint recipe.

    python benchmarks/recovery.py [--rounds 10] [--kills 3] [--write]

The contenders take turns. In each round a training is started and one of its workers, another one each time, is killed
`kills` times, some steps apart. Measured from the moment of the kill, by the clock of the steps that follow:
  torchrun            --max-restarts, a checkpoint every 10 steps, loaded by all workers when they have started again
  paceline            the two that are left go on; the replacement joins later (its own line)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "recovery.json"
BIN = Path(sys.executable).absolute().parent
WORKERS = 3
STEPS = 100_000
BETWEEN = 25
"""Steps between two kills."""
PATIENCE_S = 60.0


@dataclass
class Kill:
    """One kill, and what came of it."""

    rank: int
    recovered_s: float | None
    """None where no step was finished any more."""
    redone: int | None
    back_s: float | None = None
    """Until all workers were in service again."""
    longest_wait_s: float | None = None
    """The longest time without a finished step between the recovery and that moment."""


@dataclass
class Watched:
    """A training in progress: its steps as (number, time), from whoever reports them."""

    process: subprocess.Popen[bytes]
    steps: Callable[[], list[tuple[int, float]]]
    pids: Callable[[], dict[int, int]]
    kills: list[Kill] = field(default_factory=list)


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE_S) -> bool:
    """Wait for a condition; says whether it came."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def start_paceline(folder: Path) -> Watched:
    out = folder / "run"
    command = [str(BIN / "paceline"), "train", f"{HERE / 'recovery_task.py'}:Mlp", "--workers", str(WORKERS)]
    command += ["--steps", str(STEPS), "--out", str(out), "--max-restarts", "100", "--threads", "1"]

    def events(kind: str) -> list[dict[str, float]]:
        path = out / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for line in lines if (event := json.loads(line))["kind"] == kind]

    def steps() -> list[tuple[int, float]]:
        return [(int(event["step"]), event["time"]) for event in events("step")]

    def pids() -> dict[int, int]:
        rows = json.loads((out / "workers.json").read_text()) if (out / "workers.json").exists() else []
        return {row["rank"]: row["pid"] for row in rows}

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return Watched(subprocess.Popen(command, cwd=folder, **quiet), steps, pids)


def start_torchrun(folder: Path) -> Watched:
    command = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=100"]
    command += [str(HERE / "recovery_task.py"), str(folder), str(STEPS)]

    def lines(rank: int) -> list[list[str]]:
        path = folder / f"steps-{rank}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def steps() -> list[tuple[int, float]]:
        return [
            (int(words[1]), float(words[2])) for words in lines(0) if words[0] == "step" and len(words) == 3
        ]

    def pids() -> dict[int, int]:
        starts = {rank: [words for words in lines(rank) if words[0] == "start"] for rank in range(WORKERS)}
        return {rank: int(found[-1][1]) for rank, found in starts.items() if found}

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # Without this its restarts race on the shared store, and about half of them fail.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    return Watched(subprocess.Popen(command, cwd=folder, env=environment, **quiet), steps, pids)


def kill_one(run: Watched, rank: int) -> Kill:
    """Kill a worker and measure until the next finished step, and until all are back."""
    seen = len(run.steps())
    if not wait_for(lambda: len(run.steps()) >= seen + BETWEEN and len(run.pids()) == WORKERS):
        return Kill(rank, None, None)
    pids = run.pids()
    os.kill(pids[rank], signal.SIGKILL)
    killed = time.time()

    def after() -> list[tuple[int, float]]:
        return [(number, moment) for number, moment in run.steps() if moment > killed]

    # Steps reach the disk up to half a second late; their own times tell.
    if not wait_for(lambda: len(after()) > 1):
        return Kill(rank, None, None)
    done = [number for number, moment in run.steps() if moment <= killed]
    first, moment = after()[0]
    # The step in progress when the worker died is lost in any case; further ones were finished and are done again.
    kill = Kill(rank, moment - killed, 1 + max(0, max(done) + 1 - first))
    wait_for(lambda: len(set(run.pids().values()) - {pids[rank]}) == WORKERS and len(after()) > 10, 15.0)
    if len(set(run.pids().values()) - {pids[rank]}) == WORKERS:
        kill.back_s = time.time() - killed
        moments = [moment for _, moment in after()]
        kill.longest_wait_s = max(b - a for a, b in pairwise(moments))
    return kill


CONTENDERS = {"torchrun": start_torchrun, "paceline": start_paceline}


def measure(name: str, kills: int, turn: int) -> list[Kill]:
    with tempfile.TemporaryDirectory() as folder:
        run = CONTENDERS[name](Path(folder))
        try:
            return [kill_one(run, (turn + kill) % WORKERS) for kill in range(kills)]
        finally:
            run.process.send_signal(signal.SIGINT)
            try:
                run.process.wait(20)
            except subprocess.TimeoutExpired:
                run.process.kill()
                run.process.wait()


def summary(kills: list[Kill]) -> dict[str, object]:
    times = sorted(kill.recovered_s for kill in kills if kill.recovered_s is not None)
    back = sorted(kill.back_s for kill in kills if kill.back_s is not None)
    waits = [kill.longest_wait_s for kill in kills if kill.longest_wait_s is not None]

    def at(share: float, values: list[float]) -> float | None:
        return round(values[min(len(values) - 1, int(share * len(values)))], 4) if values else None

    return {
        "kills": len(kills),
        "recovered": len(times),
        "seconds_p50": at(0.5, times),
        "seconds_p95": at(0.95, times),
        "seconds_max": at(1.0, times),
        "steps_redone_max": max((kill.redone for kill in kills if kill.redone is not None), default=None),
        "steps_redone_mean": round(statistics.mean(k.redone for k in kills if k.redone is not None), 2)
        if times
        else None,
        "all_back_p50": at(0.5, back),
        "all_back_max": at(1.0, back),
        "longest_wait_until_back": round(max(waits), 4) if waits else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    kills: dict[str, list[Kill]] = {name: [] for name in CONTENDERS}
    for turn in range(options.rounds):
        for name in CONTENDERS:
            made = measure(name, options.kills, turn)
            kills[name] += made
            print(
                f"round {turn + 1}/{options.rounds}  {name:10}",
                *(f"{k.recovered_s or float('nan'):7.3f} s" for k in made),
            )
    found = {name: summary(made) for name, made in kills.items()}
    ratio = (
        found["paceline"]["seconds_p50"] / found["torchrun"]["seconds_p50"]
        if found["torchrun"]["recovered"]
        else None
    )
    for name, numbers in found.items():
        print(f"\n{name}")
        for key, value in numbers.items():
            print(f"  {key:26} {value}")
    print(f"\npaceline / torchrun, p50: {ratio and round(ratio, 4)}")
    if options.write:
        facts = {"torch": torch.__version__, "cores": len(os.sched_getaffinity(0)), "workers": WORKERS}
        RESULT.write_text(json.dumps({**facts, "contenders": found, "ratio_p50": ratio}, indent=1) + "\n")


if __name__ == "__main__":
    main()

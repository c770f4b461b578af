"""Five jobs in plain DDP, Accelerate, Lightning and paceline: lines, time to the first step, time of a step, right or wrong.

    python benchmarks/compare.py [--rounds 3] [--jobs classify,...] [--frameworks plain,...] [--write]

The scripts are those of `benchmarks/compare/`, one for each job and framework; all use its `work.py`. A round runs the contenders
of a job one after the other, with 2 workers on the CPU. Accelerate and Lightning run under torchrun, as plain DDP does. They are
no dependencies of paceline: `pip install accelerate lightning`; whoever is not installed is left out.

What counts as right:
- classify: the reported accuracy is that of the final weights, each held-out sample counted once; and 2 workers come to the
  weights of 1.
- finetune: the weights are those of one process in which every token counts once (relative difference below 1e-5).
- gan: 2 workers come to the weights of 1.
- resume: all processes are killed in the second epoch and started again. No sample of an epoch is trained on twice or never, and
  the weights are those of a run that nothing happened to.
- kill: one of the workers is killed. The run goes on, and ends with the weights of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent / "compare"
RESULT = HERE.parent / "results" / "compare.json"
PAGE = HERE.parents[1] / "docs" / "compare.md"
sys.path.insert(0, str(HERE))

import work  # noqa: E402

JOBS = ("classify", "finetune", "gan", "resume", "kill")
FRAMEWORKS = ("plain", "accelerate", "lightning", "paceline")
WORKERS, LIMIT_S = 2, 300
KILL_AT = 37
"""The step of the second epoch at which processes are killed."""
PAUSED, PAUSE_S = ("resume", "kill"), 0.05
"""In these jobs each step waits for so long, and processes can be killed at one."""
NUMBERS = (
    "first_step_s", "step_ms", "accuracy_error", "counted", "from_one_process", "from_exact", "twice", "never", "redone",
    "to_next_new_step_s", "from_undisturbed",
)  # fmt: skip


class Trial:
    """One run of one script in a folder of its own."""

    def __init__(self, job: str, framework: str, workers: int, folder: Path) -> None:
        self.folder, self.script = folder, HERE / f"{'resume' if job == 'kill' else job}_{framework}.py"
        self.command = [sys.executable, str(self.script), str(workers)]
        if framework != "paceline":
            elastic = ["--max-restarts", "3"] if job == "kill" else []
            launcher = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(workers),
                *elastic,
            ]
            self.command = [sys.executable, *launcher, str(self.script)]
        self.pause = PAUSE_S if job in PAUSED else 0.0
        self.started = 0.0

    def start(self) -> subprocess.Popen[bytes]:
        """Start it."""
        self.started = time.time()
        environment = os.environ | {
            "COMPARE_OUT": str(self.folder),
            "COMPARE_PAUSE_S": str(self.pause),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        with (self.folder / "output.txt").open("ab") as output:
            return subprocess.Popen(
                self.command,
                env=environment,
                cwd=self.folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def run(self) -> bool:
        """Run it to its end; return whether it ended well."""
        return self.end(self.start())

    def end(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the end of the run, and end what is left of it; return whether it ended well."""
        try:
            return process.wait(LIMIT_S) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.kill(process)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the command, its process group, and what it has started in groups of their own, as torchrun does."""
        try_kill(os.killpg, process.pid)
        process.wait()
        mark = f"COMPARE_OUT={self.folder}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (place / "environ").read_bytes().split(b"\0"):
                    try_kill(os.kill, int(place.name))

    def journals(self) -> list[dict[str, Any]]:
        """Return what all processes wrote down, by time; each line with the rank and the process."""
        lines = []
        for path in self.folder.glob("journal-*.jsonl"):
            _, rank, pid = path.stem.split("-")
            rows = (
                json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")
            )
            lines += [{"rank": int(rank), "process": int(pid), **row} for row in rows]
        return sorted(lines, key=lambda line: line["at"])

    def weights(self) -> torch.Tensor | None:
        """Return the final weights of rank 0."""
        path = self.folder / "weights.pt"
        return torch.load(path) if path.exists() else None

    def times(self) -> dict[str, float]:
        """Return the seconds to the first step, and the milliseconds of a step, of rank 0."""
        at = [line["at"] for line in self.journals() if line["rank"] == 0 and "step" in line]
        steps = [1000 * (b - a) for a, b in itertools.pairwise(at[3:])]
        return {"first_step_s": at[0] - self.started, "step_ms": statistics.median(steps)}


def try_kill(kill: Any, pid: int) -> None:
    """Send SIGKILL, if there still is whom to send it to."""
    with contextlib.suppress(ProcessLookupError):
        kill(pid, signal.SIGKILL)


def difference(one: torch.Tensor | None, other: torch.Tensor | None) -> float | None:
    """Return the relative difference of two sets of weights: 0.0 only where all bits are the same."""
    if one is None or other is None or one.shape != other.shape:
        return None
    return float((one.double() - other.double()).norm() / other.double().norm())


def trial(job: str, framework: str, base: Path, name: str, workers: int = WORKERS) -> Trial:
    """Return a run with a folder."""
    folder = base / f"{job}-{framework}-{name}"
    folder.mkdir()
    return Trial(job, framework, workers, folder)


def as_one_process(job: str, framework: str, base: Path, two: Trial) -> dict[str, Any]:
    """Return how far 2 workers are from 1 of the same script."""
    one = trial(job, framework, base, "one", 1)
    return {"from_one_process": difference(two.weights(), one.weights() if one.run() else None)}


def classify(framework: str, base: Path, two: Trial) -> dict[str, Any]:
    """Return whether the evaluation was right, and how far 2 workers are from 1."""
    told = next(line for line in two.journals() if "accuracy" in line)
    model, weights = work.classifier().eval(), two.weights()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    _, images, labels = work.digits()[1].tensors  # type: ignore[attr-defined]
    accuracy = float((model(images).argmax(-1) == labels).float().mean())
    facts = {
        "accuracy_error": abs(told["accuracy"] - accuracy),
        "counted": told.get("counted"),
    }
    facts |= as_one_process("classify", framework, base, two)
    return {**facts, "right": facts["accuracy_error"] < 1e-6 and facts["from_one_process"] == 0.0}


def finetune(framework: str, base: Path, two: Trial) -> dict[str, Any]:
    """Return how far the weights are from those of one process in which each token counts once."""
    del framework, base
    exact = torch.cat([one.detach().flatten() for one in work.exact_reader(20, 0.5).parameters()])
    far = difference(two.weights(), exact)
    return {"from_exact": far, "right": far is not None and far < 1e-5}


def gan(framework: str, base: Path, two: Trial) -> dict[str, Any]:
    """Return how far 2 workers are from 1."""
    facts = as_one_process("gan", framework, base, two)
    return {**facts, "right": facts["from_one_process"] == 0.0}


def wait_for(run: Trial, process: subprocess.Popen[bytes], step: int) -> list[dict[str, Any]]:
    """Wait until all ranks have come to a step; return what they wrote."""
    until = time.time() + LIMIT_S
    while time.time() < until and process.poll() is None:
        lines = run.journals()
        if len({line["rank"] for line in lines if line.get("step", 0) >= step}) == WORKERS:
            return lines
        time.sleep(0.01)
    return run.journals()


def resume(framework: str, base: Path, quiet: Trial) -> dict[str, Any]:
    """Kill all processes, start again, and count which samples the final weights have seen."""
    run = trial("resume", framework, base, "killed")
    process = run.start()
    wait_for(run, process, KILL_AT)
    run.kill(process)
    time.sleep(1.0)  # what the launcher forked goes with it
    before = [line for line in run.journals() if "step" in line]
    ended = run.run()
    after = [line for line in run.journals() if "step" in line][len(before) :]
    first = min((line["step"] for line in after), default=0)
    counted = [line for line in before if line["step"] < first] + after
    return {"ended": ended, **_samples(counted), **_same(ended, run, quiet)}


def _samples(counted: list[dict[str, Any]]) -> dict[str, int]:
    per_epoch = -(-1437 // work.BATCH)
    twice = never = 0
    for epoch in range(work.EPOCHS):
        steps = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
        seen = Counter(one for line in counted if line["step"] in steps for one in line["samples"])
        twice += sum(count - 1 for count in seen.values())
        never += 1437 - len(seen)
    return {"twice": twice, "never": never}


def _same(ended: bool, run: Trial, quiet: Trial) -> dict[str, Any]:
    far = difference(run.weights(), quiet.weights()) if ended else None
    return {"from_undisturbed": far, "right": far == 0.0}


def kill(framework: str, base: Path, quiet: Trial) -> dict[str, Any]:
    """Kill one worker in the second epoch."""
    run = trial("kill", framework, base, "killed")
    process = run.start()
    before = wait_for(run, process, KILL_AT)
    victim = next(line["process"] for line in reversed(before) if line["rank"] == 1)
    killed = time.time()
    try_kill(os.kill, victim)
    ended = run.end(process)
    reached = max(line.get("step", 0) for line in before)
    later = [
        line
        for line in run.journals()
        if line["at"] > killed and "step" in line and line["process"] != victim
    ]
    first = next((line for line in later if line["step"] > reached), None)
    redone = sum(line["step"] <= reached for line in later if line["rank"] == 0)
    return {
        "ended": ended,
        "to_next_new_step_s": None if first is None else first["at"] - killed,
        "redone": redone,
        **_same(ended, run, quiet),
    }


def lines_of(job: str, framework: str) -> int:
    """Return how many lines of a script are neither empty nor a comment."""
    text = (HERE / f"{'resume' if job == 'kill' else job}_{framework}.py").read_text()
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


def measure(job: str, framework: str, base: Path) -> dict[str, Any]:
    """Run one job once."""
    run = trial(job, framework, base, "two")
    if not run.run():
        print((run.folder / "output.txt").read_text()[-2000:], file=sys.stderr)
        return {"right": False, "ended": False}
    return {**run.times(), **globals()[job](framework, base, run)}


def summed_up(rounds: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how often it came out right and ended, medians of its numbers, and of their ratios to plain DDP's of the round."""
    found: dict[str, Any] = {"rounds": len(rounds), "right": sum(one["right"] for one in rounds)}
    found["ended"] = sum(one.get("ended", True) for one in rounds)
    for key in NUMBERS:
        values = [one[key] for one in rounds if one.get(key) is not None]
        if values:
            found[key] = statistics.median(values)
    found["ratios"] = {
        key: statistics.median(ratios)
        for key in ("first_step_s", "step_ms")
        if (
            ratios := [
                one[key] / other[key]
                for one, other in zip(rounds, plain, strict=False)
                if key in one and key in other
            ]
        )
    }
    return {**found, "each": rounds}


TITLES = {
    "classify": "an image classifier: clipping, a schedule per step, an evaluation of 103 samples",
    "finetune": "fine-tuning with padded labels, four micro-batches per update",
    "gan": "a GAN: two models and two optimizers",
    "resume": "all processes killed in the second epoch, and started again",
    "kill": "one of two workers killed",
}
WORDS = """# Compared

<!-- Generated by `python benchmarks/compare.py --write`. Do not edit. -->

The same five jobs, written for plain DDP, Accelerate, Lightning and paceline as their documents advise, with 2 workers on a CPU
({about}). The scripts are in `benchmarks/compare/`. `benchmarks/compare.py` runs the contenders of a job in turn in each
round, and says at its top what counts as right. Times are relative to plain DDP in the same round, numbers are medians over the
rounds; what each round measured is in `benchmarks/results/compare.json`.
"""
NOTES = """
A wrong answer here is no fault of a script: DDP averages means, so tokens in short batches count for more; its sampler repeats
samples until the workers divide them; dropout and noise are drawn by rank, so two workers train another model than one. Each
framework documents ways around some of this. paceline needs none; that the weights do not depend on the number of workers is
shown on any task by

```console
$ paceline verify digits --strategy ddp --workers 2 --steps 4
digits: 4 steps...
...
every promise holds...
```
"""


def page(result: dict[str, Any]) -> str:
    """Return the page that shows a result."""
    about = ", ".join(f"{name} {value}" for name, value in result["about"].items())
    parts = [WORDS.format(about=about)]
    for job, rows in result["jobs"].items():
        # Where processes are killed each step waits, so that there is time to: how long it takes says nothing.
        timed = {"first_step_s": "to the first step"} | ({} if job in PAUSED else {"step_ms": "a step"})
        heads = ["", "lines", "right", *timed.values(), ""]
        lines = [heads, ["---"] * len(heads)]
        for name, row in rows.items():
            ratios = (f"{row['ratios'][key]:.2f}" if key in row["ratios"] else "" for key in timed)
            lines.append([name, str(row["lines"]), _of_rounds(row, "right"), *ratios, _facts(row)])
        parts.append(f"\n## {TITLES[job][0].upper()}{TITLES[job][1:]}\n\n")
        parts += [f"| {' | '.join(cells)} |\n" for cells in lines]
    return "".join(parts) + NOTES


def _of_rounds(row: dict[str, Any], key: str) -> str:
    """Return yes or no, or in how many of the rounds where they differ."""
    count, rounds = row[key], row["rounds"]
    return "no" if not count else "yes" if count == rounds else f"{count} of {rounds}"


def _facts(row: dict[str, Any]) -> str:
    """Return in words what was found besides."""
    words = {
        "accuracy_error": "error of the accuracy {:.1e}",
        "counted": "{:.0f} samples evaluated",
        "from_one_process": "weights {:.1e} from those of one process",
        "from_exact": "weights {:.1e} from the exact ones",
        "twice": "{:.0f} samples twice",
        "never": "{:.0f} never",
        "redone": "{:.0f} steps redone",
        "to_next_new_step_s": "next new step after {:.1f} s",
        "from_undisturbed": "weights {:.1e} from the undisturbed run's",
    }
    told = [text.format(row[key]) for key, text in words.items() if row.get(key) is not None]
    if row["ended"] < row["rounds"]:
        told.insert(0, f"ended well in {row['ended']} of {row['rounds']}")
    return "; ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    parser.add_argument("--write", action="store_true", help="write the result, and docs/compare.md")
    options = parser.parse_args()
    present = [
        one
        for one in options.frameworks.split(",")
        if one in ("plain", "paceline") or importlib.util.find_spec(one) is not None
    ]
    result: dict[str, Any] = {}
    for job in options.jobs.split(","):
        rounds: dict[str, list[dict[str, Any]]] = {one: [] for one in present}
        for _ in range(options.rounds):
            for framework in present:
                with tempfile.TemporaryDirectory(prefix="compare-") as base:
                    rounds[framework].append(measure(job, framework, Path(base)))
        for framework in present:
            summary = summed_up(rounds[framework], rounds.get("plain", []))
            row = {"lines": lines_of(job, framework), **summary}
            result.setdefault(job, {})[framework] = row
            print(f"{job:9} {framework:11}", json.dumps({**row, "each": ...}, default=str)[:600], flush=True)
    versions = {name: sys.modules[name].__version__ for name in ("torch",)}
    for name in ("accelerate", "lightning"):
        if name in present:
            versions[name] = importlib.metadata.version(name)
    about = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        **versions,
    }
    if options.write:
        found = {"about": about, "workers": WORKERS, "jobs": result}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()

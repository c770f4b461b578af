"""How many of paceline's own functions one step passes: calls, functions and files, on rank 0 of 2 gloo workers.

    python benchmarks/step_calls.py [--list] [--write]

What a gradient passes is what somebody has to read who carries on. One Linear is trained as a Task, and by a loop of one's
own; from one call of the loss to the next is one step. Every thread is counted, a generator that goes on counts as a call,
comprehensions do not. The step is neither one of the first nor one of those at which more is looked at (1, 2, 4, 8, ...).
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from models import CASES
from torch import Tensor, nn

import paceline

RESULT = Path(__file__).with_name("results") / "step_calls.json"
PACKAGE = str(Path(paceline.__file__).parent)
COUNTED, STEPS = 37, 40
CASE = CASES["linear"]


class Count:
    """Counts what is called between two calls of `tick`."""

    def __init__(self) -> None:
        self.seen = collections.Counter[str]()
        self.ticks = 0

    def begin(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def tick(self) -> None:
        self.ticks += 1

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.ticks != COUNTED or event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if not code.co_name.endswith("comp>") and code.co_name != "<genexpr>":
            self.seen[f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_qualname}"] += 1


class Task(paceline.Task):
    """One Linear, and the count of what a step passes, written by rank 0."""

    batch_size = CASE.batch_size
    steps = STEPS

    def __init__(self, out: str = "") -> None:
        self.out, self.count = out, Count()

    def model(self) -> nn.Module:
        self.count.begin()
        return CASE.make_model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    def train_data(self) -> Any:
        return CASE.make_data()

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> paceline.Loss:
        self.count.tick()
        if self.count.ticks == COUNTED + 1 and torch.distributed.get_rank() == 0:
            Path(self.out).write_text(json.dumps(self.count.seen))
        return paceline.Loss.mean(CASE.losses(model, batch))


def loop(run: paceline.Run) -> dict[str, int]:
    count = Count()
    count.begin()
    model = CASE.make_model()
    model, _ = run.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in run.steps(CASE.make_data(), batch_size=CASE.batch_size, steps=STEPS):
        for batch in step:
            count.tick()
            losses = CASE.losses(model, batch)
            step.backward(losses.sum(), len(losses))
        step.apply()
    sys.setprofile(None)
    threading.setprofile(None)
    return dict(count.seen)


def of_task(strategy: str) -> dict[str, int]:
    from paceline.cli.main import run

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "calls.json"
        sys.argv = [
            "paceline",
            "train",
            f"{__file__}:Task",
            "--workers",
            "2",
            "--device",
            "cpu",
            "--threads",
            "1",
        ]
        sys.argv += [
            "--strategy",
            strategy,
            "--out",
            f"{folder}/run",
            "--steps",
            str(STEPS),
            "--set",
            f"out={out}",
        ]
        try:
            run()
        except SystemExit as end:
            if end.code:
                raise
        return dict(json.loads(out.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", default="ddp,fsdp")
    parser.add_argument("--list", action="store_true", help="print each function with its calls")
    parser.add_argument("--write", action="store_true", help="write the result beside this script")
    options = parser.parse_args()
    results = {}
    for strategy in options.strategies.split(","):
        counts = {
            "task": of_task(strategy),
            "loop": paceline.launch(loop, workers=2, threads=1, device="cpu", strategy=strategy)[0],
        }
        for kind, seen in counts.items():
            files = {name.split(":")[0] for name in seen}
            result = {"calls": sum(seen.values()), "functions": len(seen), "files": len(files)}
            results[f"{strategy} {kind}"] = result
            print(strategy, kind, result)
            for name, calls in sorted(seen.items()) if options.list else ():
                print(f"  {calls:3} {name}")
    if options.write:
        about = {
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "workers": 2,
            "model": "linear",
        }
        RESULT.write_text(json.dumps({"about": about, "strategies": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

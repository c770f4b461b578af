"""How long training waits for a checkpoint: a plain save, a sharded one, a sharded one in the background.

    python benchmarks/checkpoint_stall.py [--workers 2] [--rounds 8] [--write]
    python benchmarks/checkpoint_stall.py --device cuda --write      # 1 B parameters on one GPU

All contenders live in the same workers, take turns at the same disk, and hold a model of the same size with its AdamW
state. `plain` is the usual recipe: rank 0 gathers everything, torch.save, fsync, the others wait at a barrier. `sharded` is
paceline's save: every worker writes its own part with checksums, and a manifest commits. `sharded async` is the same with
--save-async: what counts is how long `run.save()` keeps training waiting; then steps go on while it is written, and `steps
beside it` says how much slower those are. The first save of each warms up: it allocates what later ones use again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from models import CASES, Gpt
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.training.run import engine_of

RESULT = Path(__file__).with_name("results") / "checkpoint_stall.json"


def _model(size: str) -> Callable[[], nn.Module]:
    if size == "1B":

        def made() -> nn.Module:
            with torch.device("cuda"):
                return Gpt(vocabulary=32768, width=1792, layers=24, length=64)

        return made
    return Gpt


class Contender:
    """A run that takes a few steps, saves, and says how long it had to wait."""

    def __init__(self, run: paceline.Run, size: str, out: Path, *, plain: bool) -> None:
        self.run, self.out, self.plain = run, out, plain
        self.vocabulary = 32768 if size == "1B" else 512
        engine_of(run).preparation.prepare_replica(
            _model(size), lambda made: torch.optim.AdamW(made.parameters(), lr=1e-4)
        )
        data = TensorDataset(torch.randint(self.vocabulary, (4096, 65)))
        self._steps = iter(run.steps(data, batch_size=8, steps=10**9))

    def steps(self, count: int) -> float:
        """Take steps, and give the seconds of one."""
        started = time.perf_counter()
        for _ in range(count):
            next(self._steps).compute(
                lambda model, batch: paceline.Loss.mean(CASES["gpt"].losses(model, batch))
            )
        self._settle()
        return (time.perf_counter() - started) / count

    def save(self) -> float:
        """Save, and give the seconds until training could go on."""
        self._settle()
        self.run.world.comm.barrier()
        started = time.perf_counter()
        if self.plain:
            self._save_plainly()
        else:
            self.run.save()
        return time.perf_counter() - started

    def _settle(self) -> None:
        if self.run.world.device.type == "cuda":
            torch.cuda.synchronize()

    def _save_plainly(self) -> None:
        state = engine_of(self.run).state.replica.state()
        if self.run.world.is_first:
            path = self.out / "plain.pt"
            with path.open("wb") as file:
                torch.save({"model": state["model"], "optimizer": state["optimizer"]}, file)
                file.flush()
                os.fsync(file.fileno())
        self.run.world.comm.barrier()


def measure(run: paceline.Run, size: str, folder: str, rounds: int, between: int) -> dict[str, Any]:
    home = Path(folder)
    contenders: dict[str, Contender] = {}
    for (
        name,
        changes,
    ) in (  # in a world of one the second is the third without the thread: room on the disk is dear
        ("plain", {"out": None}),
        ("sharded", {"out": home / "sharded"}),
        ("sharded async", {"out": home / "async", "save_async": True}),
    ):
        if name == "sharded" and run.world.size == 1:
            continue
        mine = paceline.Run(run.world, replace(engine_of(run).state.options, keep=1, **changes))
        contenders[name] = Contender(mine, size, home, plain=name == "plain")
    waits: dict[str, list[float]] = {name: [] for name in contenders}
    alone: list[float] = []
    beside: list[float] = []
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            ordinary = contender.steps(between)
            waited = contender.save()
            after = contender.steps(between)
            engine_of(contender.run).saving.wait()  # the next one has the disk to itself
            if number == 0:
                continue
            waits[name].append(waited)
            if name == "sharded async":
                alone.append(ordinary)
                beside.append(after)
    ratios = {
        name: statistics.median(a / b for a, b in zip(seen, waits["plain"], strict=True))
        for name, seen in waits.items()
    }
    return {
        "parameters": engine_of(contenders["plain"].run).state.parameters,
        "wait": {
            name: {"median_s": round(statistics.median(seen), 4), "ratio": round(ratios[name], 4)}
            for name, seen in waits.items()
        },
        "steps beside it": round(statistics.median(b / a for a, b in zip(alone, beside, strict=True)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", help="the disk to write to; default: a temporary folder")
    parser.add_argument("--write", action="store_true", help="write the result beside this script")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    home = tempfile.mkdtemp(prefix="checkpoint-stall-", dir=options.folder)
    try:
        launched = {"workers": 1} if on_gpu else {"workers": options.workers, "threads": 1}
        size, between = ("1B", 20) if on_gpu else ("10M", 2)
        (rows, *_) = paceline.launch(
            measure, size, home, options.rounds, between, strategy="fsdp", device=options.device, **launched
        )
    finally:
        shutil.rmtree(home)
    print(f"{rows['parameters'] / 1e6:.0f} M parameters")
    for name, row in rows["wait"].items():
        print(f"  {name:14} training waits {row['median_s']:8.3f} s  {row['ratio']:.3f} of plain")
    print(f"  a step beside the writing takes {rows['steps beside it']:.2f} times as long")
    if options.write:
        about = {"torch": torch.__version__, "rounds": options.rounds, "device": options.device, **launched}
        target = RESULT.with_stem("checkpoint_stall_gpu") if on_gpu else RESULT
        target.write_text(json.dumps({"about": about, **rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

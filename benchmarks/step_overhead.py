"""A step of paceline's ddp against a hand-written, well-tuned DDP loop, on 2 gloo workers.

    python benchmarks/step_overhead.py [--rounds 30]

Every worker holds all contenders and runs them in turn, a block of steps each, round after round: noise of the
machine hits all alike, and what counts is the ratio within a round. Contenders:
  hand         torch's DDP, gradients as bucket views, batches cut from tensors by a shuffled index: no loader at all
  hand+loader  the same with DataLoader and DistributedSampler, as most people write it
  paceline     Run.steps and Step.compute, as `paceline train` runs them, events included
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models import CASES, Case
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import paceline
from paceline.training.run import engine_of

RESULT = Path(__file__).with_name("results") / "step_overhead.json"


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


def hand(case: Case, run: paceline.Run, *, loader: bool) -> Iterator[None]:
    rank, size = run.world.rank, run.world.size
    model = DistributedDataParallel(case.make_model(), gradient_as_bucket_view=True)
    optimizer = optimizer_for(model)
    data = case.make_data()
    share = case.batch_size // size
    sampler = DistributedSampler(data, num_replicas=size, rank=rank)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        if loader:
            batches: Any = DataLoader(data, batch_size=share, sampler=sampler)
        else:
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))[rank::size]
            batches = (tuple(column[part] for column in data.tensors) for part in order.split(share))
        for batch in batches:
            optimizer.zero_grad(set_to_none=True)
            loss = case.losses(model, batch).mean()
            loss.backward()
            optimizer.step()
            loss.item()  # paceline reports the loss of every step too
            yield
        epoch += 1


def ours(case: Case, run: paceline.Run) -> Iterator[None]:
    def loss(model: nn.Module, batch: Any) -> paceline.Loss:
        return paceline.Loss.mean(case.losses(model, batch))

    engine_of(run).preparation.prepare_replica(case.make_model(), optimizer_for)
    for step in run.steps(case.make_data(), batch_size=case.batch_size, steps=10**9):
        step.compute(loss)
        yield


def block(steps: Iterator[None], count: int) -> tuple[float, float]:
    """Give wall and CPU seconds per step of one block."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(steps)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def interleave(
    run: paceline.Run, contenders: dict[str, Iterator[None]], steps: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Let the contenders take turns, each round in another order; the first round warms up."""
    seen: dict[str, list[tuple[float, float]]] = {key: [] for key in contenders}
    names = list(contenders)
    for number in range(rounds + 1):
        turn = number % len(names)
        for key in names[turn:] + names[:turn]:
            run.world.comm.barrier()
            timed = block(contenders[key], steps)
            if number > 0:
                seen[key].append(timed)
    return seen


def measure(run: paceline.Run, name: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    case = CASES[name]
    contenders = {
        "hand": hand(case, run, loader=False),
        "hand+loader": hand(case, run, loader=True),
        "paceline": ours(case, run),
    }
    return interleave(run, contenders, case.steps, rounds)


def summarise(seen: dict[str, list[tuple[float, float]]], against: str = "hand") -> dict[str, Any]:
    """Give each contender's medians, and the median over the rounds of its ratio to one of them."""
    pick: Callable[[str, int], list[float]] = lambda key, column: [row[column] for row in seen[key]]  # noqa: E731
    result: dict[str, Any] = {}
    for key in seen:
        wall, cpu = pick(key, 0), pick(key, 1)
        result[key] = {
            "wall_ms": round(statistics.median(wall) * 1e3, 4),
            "cpu_ms": round(statistics.median(cpu) * 1e3, 4),
            "wall_ratio": round(
                statistics.median(a / b for a, b in zip(wall, pick(against, 0), strict=True)), 4
            ),
            "cpu_ratio": round(
                statistics.median(a / b for a, b in zip(cpu, pick(against, 1), strict=True)), 4
            ),
        }
    return result


def show(title: str, rows: dict[str, Any]) -> None:
    """Print one case."""
    print(f"\n{title}")
    print(f"  {'':12} {'wall ms':>9} {'cpu ms':>9} {'wall':>7} {'cpu':>7}")
    for key, row in rows.items():
        print(
            f"  {key:12} {row['wall_ms']:9.3f} {row['cpu_ms']:9.3f} {row['wall_ratio']:7.3f} {row['cpu_ratio']:7.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--write", action="store_true", help="write the result beside this script")
    options = parser.parse_args()
    results = {}
    for name in options.cases.split(","):
        seen = paceline.launch(measure, name, options.rounds, workers=2, threads=1, device="cpu")
        results[name] = summarise(seen[0])
        show(name, results[name])
    if options.write:
        RESULT.parent.mkdir(exist_ok=True)
        about = {"torch": torch.__version__, "workers": 2, "threads": 1, "rounds": options.rounds}
        RESULT.write_text(json.dumps({"about": about, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

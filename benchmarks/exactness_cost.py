"""What the same bits cost: bitwise against numeric (torch's all-reduce) and a hand-written DDP loop.

    python benchmarks/exactness_cost.py [--rounds 20] [--workers 2,4] [--write]
    python benchmarks/exactness_cost.py --device cuda --write      # one GPU: the tree against plain accumulation

All contenders live in the same workers and take turns, a block of steps each. On CPU, V = W:
  hand           torch's DDP with batches cut from tensors, as in step_overhead.py
  numeric        paceline --exact numeric: torch's own all-reduce
  bitwise        paceline's default: the canonical tree through shared memory
  bitwise gloo   paceline --transport gloo: the same tree over sockets
On one GPU, V = 4 shards in one process (bitwise) against the same four backward passes accumulated plainly (hand), and
the most gradient memory held for V = 1, 2, 4, 8 in multiples of the parameters.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from models import CASES
from step_overhead import hand, interleave, ours, show, summarise
from torch import nn

import paceline
from paceline.training.run import engine_of

RESULT = Path(__file__).with_name("results") / "exactness_cost.json"


def on_cpu(run: paceline.Run, name: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    case = CASES[name]
    variants = {
        "numeric": {"exact": "numeric"},
        "bitwise": {"transport": "shm"},
        "bitwise gloo": {"transport": "gloo"},
    }
    contenders = {"hand": hand(case, run, loader=False)}
    for key, changes in variants.items():
        contenders[key] = ours(
            case, paceline.Run(run.world, replace(engine_of(run).state.options, **changes))
        )
    return interleave(run, contenders, case.steps, rounds)


def on_gpu(run: paceline.Run, name: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    case = replace(CASES[name], batch_size=CASES[name].batch_size * 8, steps=30)
    plain = replace(engine_of(run).state.options, shards=1, micro_batch=case.batch_size // 4)
    contenders = {"hand": ours(case, paceline.Run(run.world, plain)), "bitwise": ours(case, run)}
    return interleave(run, contenders, case.steps, rounds)


def gradient_memory(run: paceline.Run) -> float:
    """Give the peak of gradient memory in one step, in multiples of the parameters."""

    def loss(model: nn.Module, batch: Any) -> paceline.Loss:
        return paceline.Loss.mean(model(batch[0]).sum(1))

    model = nn.Linear(8192, 8192, bias=False)
    engine_of(run).preparation.prepare_replica(
        model, lambda made: torch.optim.SGD(made.parameters(), lr=1e-9)
    )
    data = torch.utils.data.TensorDataset(torch.zeros(16, 8192))
    peak = 0.0
    size = model.weight.numel() * 4
    for step in run.steps(data, batch_size=16, steps=3):
        torch.cuda.reset_peak_memory_stats()
        step.compute(loss)
        peak = (torch.cuda.max_memory_allocated() - size) / size
    return round(peak, 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--cases", default="mlp,gpt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="write the result beside this script")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.device == "cuda":
        for name in options.cases.split(","):
            seen = paceline.launch(on_gpu, name, options.rounds, strategy="single", shards=4, device="cuda")
            results[name] = summarise(seen[0])
            show(f"{name}, one GPU, 4 shards", results[name])
        held = {}
        for shards in (1, 2, 4, 8):
            (held[shards],) = paceline.launch(
                gradient_memory, strategy="single", shards=shards, device="cuda"
            )
        print("\ngradient memory held, in multiples of the parameters, by shards a worker:", held)
        results["gradient memory by shards a worker"] = held
    else:
        for workers in map(int, options.workers.split(",")):
            for name in options.cases.split(","):
                seen = paceline.launch(on_cpu, name, options.rounds, workers=workers, threads=1, device="cpu")
                results[f"{name}, {workers} workers"] = summarise(seen[0])
                show(f"{name}, {workers} workers", results[f"{name}, {workers} workers"])
    if options.write:
        about = {"torch": torch.__version__, "rounds": options.rounds, "device": options.device}
        RESULT.parent.mkdir(exist_ok=True)
        target = RESULT if options.device == "cpu" else RESULT.with_stem("exactness_cost_gpu")
        target.write_text(json.dumps({"about": about, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

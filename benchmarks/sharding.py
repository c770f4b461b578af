"""Peak memory of a worker, and the time of a step: ddp, ZeRO-1, fsdp, fsdp with recomputed blocks, beside the formula.

    python benchmarks/sharding.py [--workers 1,2,4] [--rounds 8] [--write]
    python benchmarks/sharding.py --device cuda --write      # one GPU: fsdp against a hand-written bf16, compiled loop

Memory is measured with one strategy in a process: the most resident memory of a step above what the process had before
the model was made. Memory that workers share is counted in each of them. The formula counts 4 bytes each for a weight, its
gradient and AdamW's two moments: 16 P for ddp, 8 P + 8 P / W for ZeRO-1, 16 P / W and twice the largest block (its gathered
weights and its gradient) for fsdp. It leaves out what every loop on a CPU needs beside that: activations, the temporaries of
AdamW's foreach (about 4 P of this model at once), and what malloc keeps of blocks that were freed. How much that is shows in
"hand": a loop in one process with nothing around it, on one worker's share of the batch, measured in the same way; its formula
is 16 P. Times are interleaved: all contenders live in the same workers and take turns, and ratios are to ddp.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import CASES, Case, Gpt
from step_overhead import interleave, optimizer_for, ours, show, summarise
from torch.utils.data import TensorDataset

import paceline
from paceline.strategies.tuning import Tuning
from paceline.training.run import engine_of

RESULT = Path(__file__).with_name("results") / "sharding.json"
LARGE = replace(
    CASES["gpt"],
    name="gpt 40M",
    make_model=lambda: Gpt(vocabulary=2048, width=512, layers=12),
    batch_size=8,
    steps=1,
)
CONTENDERS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ZeRO-1": {"strategy": "ddp", "tuning": Tuning(shard_optimizer=True)},
    "fsdp": {"strategy": "fsdp"},
    "fsdp+recompute": {"strategy": "fsdp", "tuning": Tuning(activation_checkpointing="blocks")},
}


def _status(field: str) -> int:
    """Read a number of bytes from this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def peak_memory(run: paceline.Run, make: Callable[[Case, paceline.Run], Iterator[None]]) -> int:
    """Give the most memory that a worker held during a few steps, above what it had before the model."""
    warm = ours(
        CASES["linear"],
        paceline.Run(run.world, replace(engine_of(run).state.options, strategy="ddp", tuning=Tuning())),
    )
    next(warm)  # loads what is loaded on first use
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    steps = make(LARGE, run)
    for _ in range(3):
        next(steps)
    return _status("VmHWM") - before


def _plain(case: Case, run: paceline.Run, *, share: int) -> Iterator[None]:
    """Take steps as one writes them by hand for one process."""
    model = case.make_model()
    optimizer = optimizer_for(model)
    (data,) = case.make_data().tensors
    for batch in data.split(share):
        optimizer.zero_grad(set_to_none=True)
        case.losses(model, (batch,)).mean().backward()
        optimizer.step()
        yield


def _made(case: Case, run: paceline.Run) -> Iterator[None]:
    """Take steps with a model that is made by the strategy, so that it may be made in parts."""

    def loss(model: Any, batch: Any) -> paceline.Loss:
        return paceline.Loss.mean(case.losses(model, batch))

    engine_of(run).preparation.prepare_replica(case.make_model, optimizer_for)
    for step in run.steps(case.make_data(), batch_size=case.batch_size, steps=10**9):
        step.compute(loss)
        yield


def step_times(run: paceline.Run, rounds: int) -> dict[str, list[tuple[float, float]]]:
    contenders = {
        name: _made(CASES["gpt"], paceline.Run(run.world, replace(engine_of(run).state.options, **changes)))
        for name, changes in CONTENDERS.items()
    }
    return interleave(run, contenders, 2, rounds)


def formulas(workers: int) -> dict[str, int]:
    model = LARGE.make_model()
    whole = sum(value.numel() for value in model.parameters()) * 4
    blocks = [sum(value.numel() for value in one.parameters()) * 4 for one in model.blocks]
    rest = whole - sum(blocks)
    largest = max(*blocks, rest)
    fsdp = 4 * whole // workers + 2 * largest
    return {
        "hand": 4 * whole,
        "ddp": 4 * whole,
        "ZeRO-1": 2 * whole + 2 * whole // workers,
        "fsdp": 4 * whole if workers == 1 else fsdp,
        "fsdp+recompute": 4 * whole if workers == 1 else fsdp,
    }


def on_cpu(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for workers in map(int, options.workers.split(",")):
        common: dict[str, Any] = {
            "workers": workers,
            "shards": workers,
            "threads": 1,
            "device": "cpu",
        }
        expected = formulas(workers)
        alone = partial(_plain, share=LARGE.batch_size // workers)
        (by_hand,) = paceline.launch(peak_memory, alone, **{**common, "workers": 1, "shards": 1})
        memory = {"hand": {"peak_mb": by_hand >> 20, "formula_mb": expected["hand"] >> 20}}
        for name, changes in CONTENDERS.items():
            peaks = paceline.launch(peak_memory, _made, **common, **changes)
            memory[name] = {"peak_mb": max(peaks) >> 20, "formula_mb": expected[name] >> 20}
        print(f"\npeak memory of a worker in MB, GPT of 40 M parameters, {workers} workers")
        for name, row in memory.items():
            print(f"  {name:16} {row['peak_mb']:6} (formula, without activations: {row['formula_mb']})")
        seen = paceline.launch(step_times, options.rounds, **common)
        times = summarise(seen[0], against="ddp")
        show(f"step of a 10 M-parameter GPT, {workers} workers", times)
        results[f"{workers} workers"] = {"memory": memory, "step": times}
    return results


# One GPU.


def on_gpu(run: paceline.Run, rounds: int) -> dict[str, Any]:
    """Compare fsdp in a world of one with a hand-written loop: bf16 autocast, torch.compile, fused AdamW."""
    case = replace(
        CASES["gpt"],
        make_model=lambda: Gpt(vocabulary=50304, width=768, layers=12, length=1024),
        make_data=lambda: TensorDataset(torch.randint(50304, (256, 1025))),
        batch_size=32,
    )
    contenders = {"hand": _hand(case), "fsdp": _ours_on_gpu(case, run)}
    seen = interleave(run, contenders, 10, rounds)
    rows = summarise(seen)
    for name, row in rows.items():
        row["tokens_per_s"] = round(32 * 1024 / row["wall_ms"] * 1e3)
        print(f"  {name:6} {row['wall_ms']:8.2f} ms, {row['tokens_per_s']} tokens/s, {row['wall_ratio']:.4f}")
    return rows


def _fused(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _loss(model: Any, batch: Any) -> torch.Tensor:
    logits = model(batch[0][:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="sum")


def _hand(case: Case) -> Any:
    model = case.make_model().cuda()
    model.compile()
    optimizer = _fused(model)
    data = case.make_data().tensors[0].pin_memory()
    while True:
        for part in torch.randperm(len(data)).split(32):
            batch = (data[part].pin_memory().to("cuda", non_blocking=True),)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = _loss(model, batch) / (32 * 1024)
            loss.backward()
            optimizer.step()
            yield


def _ours_on_gpu(case: Case, run: paceline.Run) -> Any:
    engine_of(run).preparation.prepare_replica(case.make_model, _fused)
    for step in run.steps(case.make_data(), batch_size=32, steps=10**9):
        step.compute(lambda model, batch: paceline.Loss(_loss(model, batch), 32 * 1024))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="write the result beside this script")
    options = parser.parse_args()
    started = time.perf_counter()
    if options.device == "cuda":
        (rows,) = paceline.launch(
            on_gpu,
            options.rounds,
            strategy="fsdp",
            precision="bf16",
            compile=True,
            device="cuda",
            exact="numeric",
        )
        results = {"one GPU, GPT-2 124M, bf16, compiled": rows}
    else:
        results = on_cpu(options)
    print(f"\n{time.perf_counter() - started:.0f} s")
    if options.write:
        about = {"torch": torch.__version__, "rounds": options.rounds, "device": options.device}
        target = RESULT if options.device == "cpu" else RESULT.with_stem("sharding_gpu")
        target.write_text(json.dumps({"about": about, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

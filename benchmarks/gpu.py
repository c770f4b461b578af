"""A step on one GPU: the best hand-written loop, Accelerate and paceline, each in a process of its own, in turns.

    python benchmarks/gpu.py [mlp gpt accumulate large] [--rounds 3] [--write]

  mlp         85 k parameters, batches of 128 from a TensorDataset, nothing tuned: what launching kernels costs
  gpt         GPT-2 with 124 M parameters, batch 32 x 1024, bf16, the loss compiled with the model, fused AdamW
  accumulate  the same in four micro-batches (paceline: four logical shards)
  large       1.3 B parameters, batch 8 x 1024

What counts is the ratio to the hand-written loop of the same round. Peak memory is the most that torch's allocator gave out,
from the beginning on: what a CUDA graph keeps for itself was given out when it was captured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

RESULT = Path(__file__).with_name("results") / "gpu.json"
CONTENDERS = ("hand", "accelerate", "paceline", "paceline numeric")


class Gpt2(nn.Module):
    """GPT-2 as it is trained: tied embeddings, learned positions."""

    def __init__(
        self, width: int, layers: int, heads: int, length: int = 1024, vocabulary: int = 50304
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: Callable[[], nn.Module]
    data: Callable[[], TensorDataset]
    batch: int
    passes: int
    steps: int
    warm: int
    compiled: bool
    fused: bool
    bf16: bool

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of each sample or token."""
        inputs, targets = batch
        output = model(inputs)
        return F.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="none")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW, fused where that is asked for."""
        return torch.optim.AdamW(model.parameters(), lr=1e-4, **({"fused": True} if self.fused else {}))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def _vectors() -> TensorDataset:
    return TensorDataset(torch.randn(16384, 64), torch.randint(10, (16384,)))


def _text() -> TensorDataset:
    ids = torch.randint(50257, (1024, 1025))
    return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


WARM = 66
"""Steps before the clock starts: past the capture of a CUDA graph and its comparison at step 64; the next one is at step 128."""
CASES = {
    "mlp": Case(_mlp, _vectors, 128, 1, 1500, 200, compiled=False, fused=False, bf16=False),
    "gpt": Case(lambda: Gpt2(768, 12, 12), _text, 32, 1, 40, WARM, compiled=True, fused=True, bf16=True),
    "accumulate": Case(
        lambda: Gpt2(768, 12, 12), _text, 32, 4, 40, WARM, compiled=True, fused=True, bf16=True
    ),
    "large": Case(lambda: Gpt2(2048, 24, 16), _text, 8, 1, 30, WARM, compiled=True, fused=True, bf16=True),
}


class Clock:
    """Times the steps after the first ones, from an idle GPU to an idle GPU."""

    def __init__(self, case: Case) -> None:
        self._case, self._count = case, 0
        self.done: dict[str, float] | None = None

    def step(self) -> bool:
        """Count a step; return whether it was the last one."""
        self._count += 1
        if self._count == self._case.warm:
            torch.cuda.synchronize()
            self._began = time.perf_counter()
        if self._count == self._case.warm + self._case.steps:
            torch.cuda.synchronize()
            seconds = time.perf_counter() - self._began
            peak = torch.cuda.max_memory_allocated() / 1e9
            self.done = {"ms": seconds / self._case.steps * 1e3, "gb": peak}
        return self.done is not None


def _batches(case: Case) -> Iterator[Any]:
    loader = DataLoader(case.data(), batch_size=case.batch, shuffle=True, drop_last=True, pin_memory=True)
    while True:
        for batch in loader:
            yield [part.to("cuda", non_blocking=True) for part in batch]


def hand(case: Case) -> dict[str, float]:
    """Train as one would by hand, with everything that makes it fast."""
    torch.set_float32_matmul_precision("highest")
    model = case.model().cuda()
    optimizer = case.optimizer(model)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return case.losses(model, batch).mean() / case.passes

    taken = torch.compile(loss) if case.compiled else loss
    clock = Clock(case)
    for batch in _batches(case):
        optimizer.zero_grad(set_to_none=True)
        for part in zip(*(one.chunk(case.passes) for one in batch), strict=True):
            with torch.autocast("cuda", torch.bfloat16, enabled=case.bf16):
                value = taken(model, part)
            value.backward()
        optimizer.step()
        if clock.step():
            break
    return clock.done or {}


def accelerate(case: Case) -> dict[str, float]:
    """Train with Accelerate, as its examples do."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="bf16" if case.bf16 else "no",
        gradient_accumulation_steps=case.passes,
        dynamo_backend="inductor" if case.compiled else "no",
    )
    model = case.model()
    loader = DataLoader(case.data(), batch_size=case.batch // case.passes, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, case.optimizer(model), loader)
    clock, passes = Clock(case), 0
    while clock.done is None:
        for batch in loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    value = case.losses(model, batch).mean()
                accelerator.backward(value)
                optimizer.step()
                optimizer.zero_grad()
            passes += 1
            if passes % case.passes == 0 and clock.step():
                break
    return clock.done


def _trained(run: Any, name: str) -> dict[str, float]:
    import paceline
    from paceline.training.spec import TrainSpec
    from paceline.training.trainer import Trainer

    case = CASES[name]

    class Bench(paceline.Task):
        """The case as a task."""

        batch_size = case.batch
        precision = "bf16" if case.bf16 else "fp32"

        def model(self) -> nn.Module:
            return case.model()

        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return case.optimizer(model)

        def train_data(self) -> TensorDataset:
            return case.data()

        def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
            return paceline.Loss.mean(case.losses(model, batch))

    task = Bench()
    trainer = Trainer(task, TrainSpec(task="bench", name="bench"), run)
    trainer.prepare()
    clock = Clock(case)
    for step in run.steps(trainer.loader, epochs=10_000):
        step.compute(task.loss)
        if clock.step():
            break
    return clock.done or {}


def paceline_(name: str, exact: str) -> dict[str, float]:
    """Train with paceline, as `run.steps` and `step.compute` do."""
    import paceline

    case = CASES[name]
    found: dict[str, float] = paceline.launch(
        _trained,
        name,
        strategy="single",
        device="cuda",
        shards=case.passes,
        compile=case.compiled,
        exact=exact,
    )[0]
    return found


def one(name: str, contender: str) -> dict[str, float]:
    """Run one contender in this process."""
    if contender == "hand":
        return hand(CASES[name])
    if contender == "accelerate":
        return accelerate(CASES[name])
    return paceline_(name, "numeric" if contender.endswith("numeric") else "bitwise")


def compared(name: str, rounds: int, contenders: Sequence[str]) -> dict[str, Any]:
    """Run the contenders in turns, and return medians and ratios to the hand-written loop."""
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds):
        for contender in contenders:
            command = [sys.executable, __file__, "--one", name, contender]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            last = done.stdout.strip().splitlines()[-1:] or ["null"]
            measured = json.loads(last[0]) if done.returncode == 0 else None
            if not measured:
                if number == 0:
                    print(f"{name} {contender}: not run\n{done.stderr[-1500:]}", file=sys.stderr, flush=True)
                continue
            print(f"{name} {contender}: {measured['ms']:.3f} ms, {measured['gb']:.2f} GB", flush=True)
            found.setdefault(contender, []).append(measured)
    base = found["hand"]
    return {
        contender: {
            "ms": statistics.median(each["ms"] for each in all_of),
            "gb": statistics.median(each["gb"] for each in all_of),
            "time / hand": statistics.median(a["ms"] / b["ms"] for a, b in zip(all_of, base, strict=False)),
            "memory / hand": statistics.median(a["gb"] / b["gb"] for a, b in zip(all_of, base, strict=False)),
        }
        for contender, all_of in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=[*CASES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--write", type=Path, nargs="?", const=RESULT, help="add the result to a JSON file")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "CONTENDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(*given.one)))
        return
    found: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": given.rounds,
        "cases": {},
    }
    for name in given.cases:
        found["cases"][name] = compared(name, given.rounds, given.contenders)
        print(json.dumps({name: found["cases"][name]}, indent=1), flush=True)
    if given.write:
        before = json.loads(given.write.read_text())["sittings"] if given.write.exists() else []
        given.write.write_text(json.dumps({"sittings": [*before, found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What the recovery benchmark trains, under paceline and under torchrun: the benchmarks' MLP on the same batches."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

import paceline

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import CASES, Case

SAVE_EVERY = 10


def case() -> Case:
    """Give the 5 M-parameter MLP."""
    return CASES["mlp"]


class Mlp(paceline.Task):
    """The MLP as a task."""

    batch_size = 96
    epochs = 10_000

    def model(self) -> nn.Module:
        return case().make_model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def train_data(self) -> Dataset[object]:
        torch.manual_seed(0)
        return case().make_data()

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> paceline.Loss:
        return paceline.Loss.mean(case().losses(model, batch))


def script(folder: Path, steps: int) -> None:
    """Train under torchrun by the usual recipe: a checkpoint every few steps, loaded when the workers start again."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data: TensorDataset = case().make_data()
    model = DistributedDataParallel(case().make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved, first = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    share = Mlp.batch_size // size
    with (folder / f"steps-{rank}").open("a", buffering=1) as log:
        log.write(f"start {os.getpid()} {time.time()}\n")
        for step in range(first, steps):
            begin = (step * Mlp.batch_size + rank * share) % (len(data) - share)
            batch = data[begin : begin + share]
            optimizer.zero_grad()
            case().losses(model, batch).mean().backward()
            optimizer.step()
            if rank == 0 and (step + 1) % SAVE_EVERY == 0:
                partial = saved.with_suffix(".partial")
                torch.save(
                    {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step + 1,
                    },
                    partial,
                )
                partial.replace(saved)
            log.write(f"step {step} {time.time()}\n")


if __name__ == "__main__":
    script(Path(sys.argv[1]), int(sys.argv[2]))

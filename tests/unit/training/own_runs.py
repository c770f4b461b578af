"""Runs of one worker in this very process: what a loop may and may not do is the same with any number of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import Run
from paceline.training.options import RunOptions
from paceline.world import Identity, connect

ALONE = Identity(rank=0, size=1, local_rank=0, local_size=1)


@contextmanager
def opened(**options: Any) -> Iterator[Run]:
    """Open a run of `single`, and close it whatever happens."""
    made = RunOptions(**{"strategy": "single", "device": "cpu", **options})
    run = Run(connect(ALONE, device="cpu"), made)
    try:
        yield run
    finally:
        run._engine.close()


def resumed(out: Path, **options: Any) -> Any:
    """Open a run that goes on in a folder."""
    return opened(out=out, resume=True, **options)


def data(samples: int = 24) -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 4, generator=made), torch.randn(samples, 1, generator=made))


def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().flatten()


def prepared(run: Run, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    return run.prepare(model, torch.optim.SGD(model.parameters(), **{"lr": 0.05, **options}))

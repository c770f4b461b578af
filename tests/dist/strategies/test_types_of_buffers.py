"""Buffers, and parameters that are not trained, of types that few operations of torch's know, on every strategy."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss

FEATURES = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
TYPES = (
    torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32,
)  # fmt: skip


class Typed(nn.Module):
    """Holds values of many types, other ones on each rank to begin with."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        for place, dtype in enumerate(TYPES):
            value = torch.tensor([rank + 1.0, place]).to(dtype)
            self.register_buffer(f"held{place}", value)
            self.register_parameter(f"frozen{place}", nn.Parameter(value.clone(), requires_grad=False))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values)  # type: ignore[no-any-return]


def train(run: paceline.Run) -> dict[str, list[int]]:
    """Return the bytes of what is of an odd type."""
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    model = Typed(run.world.rank if run.world.size > 1 else 0)
    model, _ = run.prepare(model, torch.optim.SGD([*model.layer.parameters()], lr=0.1))
    for step in run.steps(TensorDataset(FEATURES), batch_size=8, steps=3):
        step.compute(lambda made, batch: Loss.mean(made(batch[0]).square().flatten()))
    return {
        name: one.detach().view(torch.uint8).tolist()
        for name, one in (*model.named_parameters(), *model.named_buffers())
        if name.startswith(("held", "frozen"))
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    ("strategy", "workers"), [("single", 1), ("dp", 2), ("ddp", 2), ("ps", 2), ("local-sgd", 2)]
)
def test_all_workers_hold_the_first_ones(strategy: str, workers: int) -> None:
    found = paceline.launch(train, workers=workers, strategy=strategy, shards=2, threads=1, device="cpu")
    for held in found:
        for place, dtype in enumerate(TYPES):
            wanted = torch.tensor([1.0, place]).to(dtype).view(torch.uint8).tolist()
            assert held[f"held{place}"] == held[f"frozen{place}"] == wanted

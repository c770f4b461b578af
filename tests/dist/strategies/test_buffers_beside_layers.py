"""Buffers and computed weights where models are cut: on an nn.Sequential itself under pp, on split layers under tp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError
from paceline.training import trainer
from paceline.training.spec import TrainSpec

MASK = (torch.arange(16 * 8) % 3 > 0).float().view(16, 8)


class Masked(nn.Linear):
    """Computes with a part of its weights, and counts how often."""

    def __init__(self) -> None:
        super().__init__(8, 16)
        self.register_buffer("mask", MASK.clone())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


class Block(nn.Module):
    """Two layers that belong together."""

    def __init__(self, up: nn.Linear) -> None:
        super().__init__()
        self.up, self.act, self.down = up, nn.Tanh(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class Fit(paceline.Task):
    """Trains a model that is special in one way."""

    batch_size, shards, epochs = 16, 2, 1

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        made = nn.Sequential(Block(Masked() if self.kind == "masked" else nn.Linear(8, 16)), nn.Linear(8, 1))
        if self.kind == "of the whole":
            made.register_buffer("scale", torch.ones(2))
        if self.kind == "of a layer":
            made[0].up.register_buffer("names", torch.arange(3))  # type: ignore[operator,union-attr]
        if self.kind in ("weight", "bias"):
            prune.l1_unstructured(made[0].up, self.kind, amount=0.25)  # type: ignore[no-untyped-call]
        return made

    def tensor_plan(self) -> dict[str, str] | None:  # type: ignore[override]
        return {"0.up": "columns", "0.down": "rows"} if self.kind in ("masked", "bias") else None

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def train_data(self) -> Any:
        return TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))

    def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
        return paceline.Loss.mean(model(batch[0]).square().flatten())


def work(run: paceline.Run, spec: TrainSpec) -> dict[str, Tensor]:
    trainer.main(run, spec)
    held: dict[str, Tensor] = run._engine.state.replica.state()["model"]
    return held


def train(kind: str, strategy: str, workers: int) -> dict[str, Tensor]:
    spec = TrainSpec(task=f"{__name__}:Fit", name="fit", settings={"kind": kind})
    made = paceline.launch(work, spec, strategy=strategy, workers=workers, shards=2, threads=1, device="cpu")
    return made[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "strategy"), [("of the whole", "pp"), ("of a layer", "tp"), ("masked", "tp"), ("weight", "tp")]
)
def test_the_weights_are_those_of_one_process(kind: str, strategy: str) -> None:
    one, two = train(kind, "single", 1), train(kind, strategy, 2)
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value)
    assert kind != "masked" or one["0.up.calls"] == two["0.up.calls"] > 0


def test_a_layer_whose_bias_is_computed_is_not_split() -> None:
    with pytest.raises(InputError, match=r"^0\.up computes its weight or bias from other parameters .*prune"):
        train("bias", "tp", 2)

"""Losses with gradients in them: right under ddp, one line that names it where no backward pass goes through another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss, Task
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from tests.dist.strategies.scenarios import Outcome, same


class Penalised(Task):
    batch_size = 8
    epochs = 1

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_data(self) -> TensorDataset:
        features = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
        return TensorDataset(features, features.argmax(1) % 3)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        features, labels = batch
        if self.kind == "jacobian":
            made = torch.func.vmap(torch.func.jacrev(model))(features)
            return Loss.mean(
                F.cross_entropy(model(features), labels, reduction="none") + 0.1 * made.square().sum((1, 2))
            )
        features = features.clone().requires_grad_()
        if self.kind == "attack":
            (found,) = torch.autograd.grad(model(features).square().sum(), features)
            return Loss.mean(F.cross_entropy(model(features + found.sign()), labels, reduction="none"))
        scores = model(features)
        (made,) = torch.autograd.grad(scores.square().sum(), features, create_graph=True)
        return Loss.mean(F.cross_entropy(scores, labels, reduction="none") + 0.1 * made.square().sum(1))


def train_one(run: paceline.Run, kind: str) -> None:
    spec = TrainSpec(task=f"{__name__}:Penalised", name="penalised", steps=2, settings={"kind": kind})
    trainer.main(run, spec)


def work(run: paceline.Run, kinds: list[str]) -> dict[str, Outcome]:
    made: dict[str, Outcome] = {}
    for kind in kinds:
        own = paceline.Run(run.world, run._engine.state.options)
        try:
            train_one(own, kind)
        except paceline.InputError as error:
            made[kind] = str(error)
        else:
            made[kind] = {
                key: value.clone() for key, value in own._engine.state.replica.state()["model"].items()
            }
    return made


def train(strategy: str, workers: int, kinds: list[str]) -> list[dict[str, Outcome]]:
    return list(paceline.launch(work, kinds, strategy=strategy, workers=workers, shards=4, threads=1))


def test_ddp_is_one_process() -> None:
    kinds = ["input", "jacobian"]
    alone = train("single", 1, kinds)[0]
    for found in train("ddp", 2, kinds):
        assert [kind for kind in kinds if not same(found[kind], alone[kind])] == []


@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_second_orders_are_refused_by_name(strategy: str) -> None:
    for found in train(strategy, 2, ["input", "jacobian"]):
        for kind, words in found.items():
            assert "Use --strategy ddp" in str(words), (kind, words)


@pytest.mark.parametrize("kind", ["input", "jacobian"])
def test_a_pipeline_refuses_them(kind: str) -> None:
    with pytest.raises(paceline.InputError, match=r"create_graph.*under pp.*Use strategy='ddp'"):
        paceline.launch(train_one, kind, strategy="pp", workers=2, shards=4, threads=1)


def test_a_pipeline_names_the_gradient_of_an_input() -> None:
    """It is no second order: nothing is learned from it."""
    with pytest.raises(paceline.InputError, match=r"the gradient of an input \(torch\.autograd\.grad: FGSM"):
        paceline.launch(train_one, "attack", strategy="pp", workers=2, shards=4, threads=1)

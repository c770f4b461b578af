"""Calls of a model, of a part of it or of one of several, that a loop makes beside its batches under fsdp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline

WORDS = torch.arange(96).view(48, 2) % 11
FEATURES = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(self.norm(hidden)).tanh()


class Inner(nn.Module):
    """A model with blocks and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(11, 8), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.blocks(self.words(words))
        return self.head(self.norm(hidden.flatten(0, 1))).view(*words.shape, 11)  # type: ignore[no-any-return]


class Wrapped(nn.Module):
    """One whose `generate` calls a model inside, as that of peft does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, words: Tensor) -> Tensor:
        return self.inner(words)  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(self, words: Tensor) -> list[int]:
        was, found = self.training, []
        self.eval()
        for _ in range(3):
            words = self.inner(words)[:, -1:].argmax(-1)
            found.append(int(words))
        self.train(was)
        return found


def chain(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, width))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train_one(run: paceline.Run, where: str) -> tuple[str, list[Any]]:
    torch.manual_seed(3)
    model: Any
    model, _ = run.prepare(Wrapped, sgd)
    found: list[Any] = []
    for step in run.steps(TensorDataset(WORDS), batch_size=12, epochs=1):
        if where == "top":
            found.append(model(WORDS[:3]).sum().item())
        for (words,) in step:
            scores = model(words[:, :1]).flatten(0, 1)
            step.backward(functional.cross_entropy(scores, words[:, 1], reduction="none"))
        if where == "before apply":
            found.append(model(WORDS[:3]).sum().item())
        step.apply()
        with torch.no_grad():
            if where == "parts":
                inner = model.inner
                found += [model.generate(WORDS[:1]), inner(WORDS[:2, :1]).sum().item()]
                found += [inner.words(WORDS[0]).tolist(), inner.blocks[0].linear(FEATURES).sum().item()]
                found.append((torch.zeros(11, 8) + inner.head.weight).sum().item())
            found.append(model(WORDS[:3]).sum().item())
            if where == "writes":
                model.inner.head.weight.mul_(0.9)
            elif where == "rank 0" and run.world.is_first:
                model.generate(WORDS[:1])
            elif where == "others":
                (model.inner.words if run.world.is_first else model.inner)(WORDS[:1])
    return run.weights_sha256(), found


def train_two(run: paceline.Run, where: str) -> tuple[str, list[float]]:
    torch.manual_seed(3)
    one, other = chain(8), chain(2)
    models, _ = run.prepare({"one": one, "other": other}, {"one": sgd(one), "other": sgd(other)})
    found: list[float] = []
    for step in run.steps(TensorDataset(FEATURES), batch_size=12, epochs=1, turns=("one", "other")):
        for (features,) in step:
            step.backward(models["other"](models["one"](features)).square().sum(1))
        if where == "before apply":
            models["one"](FEATURES[:4])
        step.apply()
        if where == "with gradients":
            models["one"](FEATURES[:4])
        with torch.no_grad():
            found.append(models["one"](FEATURES[:4]).sum().item())
            if where == "rank 0" and run.world.is_first:
                models["other"](FEATURES[:4])
    return run.weights_sha256(), found


def launch(function: Any, where: str, strategy: str, workers: int = 1, **options: Any) -> list[Any]:
    options = {"shards": 4, "threads": 1, "device": "cpu", **options}
    return list(paceline.launch(function, where, strategy=strategy, workers=workers, **options))


@pytest.mark.parametrize("function", [train_one, train_two])
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_parts_and_several_models_are_gathered_between_steps(function: Any, transport: str) -> None:
    alone = launch(function, "parts", "single")
    assert launch(function, "parts", "fsdp", 2, transport=transport) == alone * 2


@pytest.mark.parametrize("where", ["before apply", "writes"])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_call_leaves_no_copies_of_weights_that_are_about_to_change(where: str, reshard: bool) -> None:
    alone = launch(train_one, where, "single")
    assert launch(train_one, where, "fsdp", 2, reshard=reshard) == alone * 2


@pytest.mark.parametrize("function", [train_one, train_two])
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_call_on_one_worker_is_refused_at_once(function: Any, transport: str) -> None:
    with pytest.raises(
        paceline.InputError, match=r"all workers gather weights together\. Call the model on all"
    ):
        launch(function, "rank 0", "fsdp", 2, transport=transport)


def test_so_are_calls_of_different_parts() -> None:
    with pytest.raises(paceline.InputError, match="others use something else there"):
        launch(train_one, "others", "fsdp", 2)


@pytest.mark.parametrize("where", ["before apply", "with gradients"])
def test_one_of_several_is_gathered_behind_the_step_without_gradients(where: str) -> None:
    with pytest.raises(
        paceline.InputError, match=r"Call the module behind step.apply\(\) under torch.no_grad\(\)"
    ):
        launch(train_two, where, "fsdp", 2)


@pytest.mark.parametrize("where", ["top", "before apply"])
def test_a_call_is_that_of_one_process_where_workers_have_other_numbers_of_batches(where: str) -> None:
    alone = launch(train_one, where, "single", shards=3)
    assert launch(train_one, where, "fsdp", 2, shards=3) == alone * 2

"""What a loop of its own does inside `for batch in step`, where servers have no batch: as in one process, or one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.errors import InputError

STEPS = 6
PARALLEL: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"strategy": "fsdp"},
    {"strategy": "ps", "servers": 1},
    {"strategy": "ps", "servers": 2},
]


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.linspace(-1, 1, 6).roll(index), torch.tensor(index % 3)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def with_rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), momentum=0.9)


def change_rate(run: paceline.Run, differs: bool = False) -> str:
    """Set the rate and the momentum beside the batch that they are for."""
    model, optimizer = run.prepare(make, with_rate)
    for step in run.steps(Samples(), batch_size=16, steps=STEPS):
        for features, labels in step:
            group = optimizer.param_groups[0]
            group["lr"].fill_(0.5 / (1 + step.number + (run.world.rank if differs else 0)))
            group["momentum"] = 0.9 - 0.1 * step.number
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
        step.apply()
    return run.weights_sha256()


def tables() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(16, 8, mode="sum", sparse=True), nn.Linear(8, 3))


class Words(Samples):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index % 16, index % 5]), torch.tensor(index % 3)


def change_rate_of_tables(run: paceline.Run) -> str:
    model, optimizer = run.prepare(tables, lambda made: torch.optim.SGD(made.parameters(), lr=0.5))
    for step in run.steps(Words(), batch_size=16, steps=STEPS):
        for words, labels in step:
            optimizer.param_groups[0]["lr"] = 0.5 / (1 + step.number)
            step.backward(F.cross_entropy(model(words), labels, reduction="none"))
        step.apply()
    return run.weights_sha256()


def launched(function: Any, *args: Any, strategy: str, **options: Any) -> Any:
    workers = 1 if strategy == "single" else 2
    chosen: Any = {
        "strategy": strategy,
        "workers": workers,
        "shards": 4,
        "threads": 1,
        "device": "cpu",
        **options,
    }
    return paceline.launch(function, *args, **chosen)[0]


@pytest.mark.parametrize("options", PARALLEL)
def test_a_rate_that_is_set_beside_a_batch_counts(options: dict[str, Any]) -> None:
    assert launched(change_rate, **options) == launched(change_rate, strategy="single")


def test_it_counts_for_tables_on_servers() -> None:
    found = launched(change_rate_of_tables, strategy="hybrid", servers=1)
    assert found == launched(change_rate_of_tables, strategy="single")


def test_servers_refuse_rates_that_differ() -> None:
    with pytest.raises(InputError, match="changed the optimizer's options differently inside"):
        launched(change_rate, True, strategy="ps", servers=1)


def train_half(run: paceline.Run) -> str:
    model, _ = run.prepare(lambda: make().bfloat16(), lambda made: torch.optim.SGD(made.parameters(), lr=0.1))
    for step in run.steps(Samples(), batch_size=16, steps=STEPS):
        for features, labels in step:
            step.backward(F.cross_entropy(model(features.bfloat16()), labels, reduction="none").float())
        step.apply()
    return run.weights_sha256()


def test_weights_of_16_bits_are_not_cut_into_rows_on_a_cpu() -> None:
    with pytest.raises(InputError, match="weights of 16 bits"):
        launched(train_half, strategy="fsdp")
    for options in ({"strategy": "ddp", "shard_optimizer": True}, {"strategy": "ps", "servers": 1}):
        assert launched(train_half, **options) == launched(train_half, strategy="single")


def lose_the_graph(run: paceline.Run) -> None:
    run.prepare(make, lambda made: torch.optim.SGD(made.parameters(), lr=0.1))
    for step in run.steps(Samples(), batch_size=16, steps=STEPS):
        for _ in step:
            step.backward(torch.zeros(()), 0)
        step.apply()


@pytest.mark.parametrize("options", [{"strategy": "single"}, *PARALLEL[:3]])
def test_a_loss_without_a_graph_is_refused_in_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="the loss depends on nothing that is trained"):
        launched(lose_the_graph, **options)

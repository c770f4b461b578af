"""What a loop of its own does inside `for batch in step`, where servers have no batch: as in one process, or one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.errors import InputError, WorkerFailedError

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


def rate_of_weights(run: paceline.Run, of_tables: bool, where: str) -> str:
    """Set the rate by the weights that there are before a step or behind it, of which a server has some."""
    model: Any
    model, optimizer = run.prepare(
        tables if of_tables else make, lambda made: torch.optim.SGD(made.parameters(), lr=0.5)
    )

    def set_rate() -> None:
        linear = [one for one in model if isinstance(one, nn.Linear)]
        optimizer.param_groups[0]["lr"] = sum(float(one.weight.detach().norm()) for one in linear) / 10

    for step in run.steps(Words() if of_tables else Samples(), batch_size=16, steps=STEPS):
        if where == "before":
            set_rate()
        for inputs, labels in step:
            step.backward(F.cross_entropy(model(inputs), labels, reduction="none"))
        step.apply()
        if where == "behind":
            set_rate()
    return run.weights_sha256()


@pytest.mark.parametrize("where", ["before", "behind"])
@pytest.mark.parametrize(("strategy", "servers"), [("ps", 1), ("ps", 2), ("hybrid", 1), ("hybrid", 2)])
def test_a_rate_that_is_made_of_the_weights_is_that_of_the_trainers(
    strategy: str, servers: int, where: str
) -> None:
    of_tables = strategy == "hybrid"
    found = launched(rate_of_weights, of_tables, where, strategy=strategy, servers=servers)
    assert found == launched(rate_of_weights, of_tables, where, strategy="single")


@pytest.mark.parametrize("where", ["before", "behind"])
def test_so_it_is_where_trainers_go_ahead(where: str) -> None:
    """With one trainer nobody is stale, so there is one answer."""
    options = {"strategy": "ps", "servers": 2, "workers": 1, "tuning": {"staleness": 2}}
    found = launched(rate_of_weights, False, where, **options)
    assert found == launched(rate_of_weights, False, where, strategy="single")


def test_servers_refuse_rates_that_differ() -> None:
    with pytest.raises(InputError, match="differ between the trainers, whose loops"):
        launched(change_rate, True, strategy="ps", servers=1)


def uses_the_last_batch(run: paceline.Run) -> None:
    model, _ = run.prepare(make, with_rate)
    for step in run.steps(Samples(), batch_size=16, steps=2):
        for features, labels in step:
            losses = F.cross_entropy(model(features), labels, reduction="none")
            step.backward(losses)
        step.apply()
        float(losses.detach().mean())


def test_what_is_of_a_batch_is_not_on_a_server_and_it_says_why() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        launched(uses_the_last_batch, strategy="ps", servers=1)
    assert (
        "This worker is a parameter server: its loop has the same steps, but no batches" in caught.value.trace
    )


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

"""A model that a loop changes behind a step: one process's bits and its names in the state, or one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss
from tests.dist.strategies.scenarios import Outcome, same

DATA = TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)))


def net() -> nn.Sequential:
    """Return a model with a buffer: one without any may not be given one later."""
    made = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    made[3].register_buffer("count", torch.zeros(1))
    return made


def hook(model: Any) -> None:
    list(model.parameters())[-2].register_hook(lambda gradient: gradient * 0.5)


def another_layer(model: Any) -> None:
    torch.manual_seed(5)
    model[4] = nn.Linear(6, 1)


def no_layer(model: Any) -> None:
    model[2] = nn.Identity()


def new_name(model: Any) -> None:
    """Do what pruning and parametrizations do: the same parameter under another name."""
    held = dict(model[2].named_parameters())["weight"]
    del model[2].weight
    model[2].register_parameter("held", held)
    model[2].register_forward_pre_hook(lambda layer, _: setattr(layer, "weight", layer.held * 0.5))


def more(model: Any) -> None:
    model[2].register_parameter("more", nn.Parameter(torch.ones(1), requires_grad=False))


def another_function(model: Any) -> None:
    """Replace what holds no parameter itself."""
    model[1] = nn.GELU()


def buffer(model: Any) -> None:
    model[2].register_buffer("later", torch.full((1,), 0.5))


CHANGES: dict[str, Callable[[Any], None]] = {
    "hook": hook,
    "another layer": another_layer,
    "no layer": no_layer,
    "new name": new_name,
    "more": more,
    "another function": another_function,
    "buffer": buffer,
}
REPLACED = {"another layer": "4.weight", "no layer": "2.weight", "new name": "2.weight"}


def train_one(run: paceline.Run, kind: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model, _ = run.prepare(net(), lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    if kind == "hook before":
        hook(model)
    for step in run.steps(DATA, batch_size=8, epochs=1):
        step.compute(lambda model, batch: Loss.mean((model(batch[0]) - 1).square().sum(1)))
        if step.number == 1 and kind in CHANGES:
            CHANGES[kind](model)
    return {name: value.clone() for name, value in run._engine.state.replica.state()["model"].items()}


def work(run: paceline.Run, kinds: list[str]) -> dict[str, Outcome]:
    made: dict[str, Outcome] = {}
    for kind in kinds:
        own = paceline.Run(run.world, run._engine.state.options)
        try:
            made[kind] = train_one(own, kind)
        except paceline.InputError as error:
            made[kind] = str(error)
    return made


def train(strategy: str, kinds: list[str], **options: Any) -> list[dict[str, Outcome]]:
    workers = 1 if strategy == "single" else 2
    options = {"shards": 2, "threads": 1, "find_unused_parameters": True, **options}
    return list(paceline.launch(work, kinds, strategy=strategy, workers=workers, **options))


@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_a_hook_on_a_parameter_is_refused_where_passes_compute_with_others(strategy: str) -> None:
    for found in train(strategy, ["hook", "hook before"]):
        for kind, told in found.items():
            assert "4.weight has a hook (register_hook)" in str(told), kind


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    return train("single", [*REPLACED, "more", "another function", "buffer"])[0]


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_save_what_is_there_by_its_new_name(servers: int, alone: dict[str, Outcome]) -> None:
    found = train("ps", list(alone), servers=servers)[0]
    assert [kind for kind in alone if not same(found[kind], alone[kind])] == []
    assert "2.later" in found["buffer"]
    assert "2.held" in found["new name"]


@pytest.mark.parametrize("strategy", ["fsdp", "tp", "pp"])
def test_what_takes_the_place_of_a_parameter_is_refused(strategy: str) -> None:
    added = ["more", "buffer"] if strategy == "pp" else ["more"]
    for found in train(strategy, [*REPLACED, *added]):
        for kind, name in REPLACED.items():
            told = str(found[kind])
            assert f"{name} was replaced" in told or "not on this worker" in told, kind
        for kind in added:
            assert "was added to the model" in str(found[kind]), kind


def test_fsdp_saves_buffers_that_came_later(alone: dict[str, Outcome]) -> None:
    found = train("fsdp", ["another function", "buffer"])[0]
    assert "2.later" in found["buffer"]
    assert [kind for kind, one in found.items() if not same(one, alone[kind])] == []


def replaced_inside(run: paceline.Run, where: str) -> None:
    """Replace a layer, or a table, where servers cannot do so as well."""
    made = nn.Sequential(nn.Embedding(8, 6, sparse=True), nn.Linear(6, 1)) if where == "table" else net()
    model: Any = run.prepare(made, lambda model: torch.optim.SGD(model.parameters(), lr=0.05))[0]
    data = TensorDataset(torch.arange(32) % 8) if where == "table" else DATA
    for step in run.steps(data, batch_size=8, epochs=1):
        for batch in step:
            if where == "batches" and step.number == 1:
                another_layer(model)
            step.backward((model(batch[0]) - 1).square().sum(1))
        step.apply()
        if where == "table" and step.number == 1:
            model[0] = nn.Embedding(8, 6, sparse=True)


@pytest.mark.parametrize(
    ("strategy", "where", "words"),
    [("ps", "batches", "on rank 0, but not on the servers"), ("hybrid", "table", r"0\.weight was replaced")],
)
def test_servers_that_do_not_have_what_was_replaced_say_so(strategy: str, where: str, words: str) -> None:
    with pytest.raises(paceline.InputError, match=words):
        paceline.launch(replaced_inside, where, strategy=strategy, workers=2, shards=2, threads=1)

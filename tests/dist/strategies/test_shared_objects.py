"""What a model shares with its task and its loop is shared by its copies too: one process's bits, or one line."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss, Mean
from paceline.errors import InputError


class Config:
    """Settings that a model reads and a loop changes."""

    def __init__(self) -> None:
        self.temperature = 1.0
        self.model: nn.Module | None = None


class Block(nn.Module):
    """A layer with a plain setting of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear, self.config, self.scale = nn.Linear(6, 6), config, 1.0
        self.lock: Any = nullcontext()

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the scaled output."""
        config = self.config
        heat = config["temperature"] if isinstance(config, dict) else config.temperature
        with self.lock:
            made: Tensor = torch.tanh(self.linear(hidden)) * (heat * self.scale)
        return made


class Net(nn.Module):
    """Blocks in a row, cut into stages by their list; the root reads settings as well."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(2))
        self.act: nn.Module = nn.Tanh()
        self.mode = "plain"
        self.listed = [self.blocks[0], {"temperature": 1.0}]
        self.reaches: Callable[[Tensor], Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return one number for each sample."""
        for block in self.blocks:
            hidden = block(hidden)
        if self.reaches is not None:
            hidden = self.reaches(hidden)
        hidden = self.act(hidden) * self.listed[1]["temperature"]  # type: ignore[index]
        return hidden.sum(1) if self.mode == "plain" else hidden.square().sum(1)


def row(config: Any) -> nn.Module:
    return nn.Sequential(Block(config), Block(config))


def cool(config: Any, _: Any, __: int) -> None:
    if isinstance(config, dict):
        config["temperature"] *= 0.7
    else:
        config.temperature *= 0.7


def close_over(_: Any, model: Any, number: int) -> None:
    if number == 1:
        weight = model.blocks[1].linear.weight
        model.reaches = lambda hidden: hidden @ weight


@dataclass(frozen=True)
class Case:
    """What a loop changes behind each step, and what strategies say that refuse it; the others give one process's bits."""

    behind: Callable[[Any, Any, int], None] = lambda *_: None
    make: Callable[[Any], nn.Module] = Net
    config: Callable[[], Any] = Config
    inside: Callable[[Any, Any, int], None] = lambda *_: None
    refused: dict[str, str] = field(default_factory=dict)
    beside: str = ""
    """A strategy that it is not tried with."""


def knows_its_model(config: Any) -> nn.Module:
    model = Net(config)
    config.model = model
    return model


def locked(config: Any) -> nn.Module:
    model: Any = Net(config)
    model.blocks[1].lock = threading.Lock()
    return model  # type: ignore[no-any-return]


def at(number: int, change: Callable[[Any], Any]) -> Callable[[Any, Any, int], None]:
    return lambda _, model, now: change(model) if now == number else None


# Of what a loss does with the model under pp, each stage says so for itself, at its own time: test_pipeline has it.
CASES: dict[str, Case] = {
    "a config": Case(cool),
    "a dict": Case(cool, config=lambda: {"temperature": 1.0}),
    "a config of a row": Case(cool, make=row),
    "a config that knows its model": Case(cool, make=knows_its_model),
    "changed in the loss": Case(inside=lambda config, _, number: setattr(config, "temperature", 0.5**number)),
    "an attribute": Case(lambda _, model, number: setattr(model, "mode", "square" if number else "plain")),
    "a layer's attribute": Case(lambda _, model, number: setattr(model.blocks[1], "scale", 0.7**number)),
    "a row's attribute": Case(lambda _, model, number: setattr(model[1], "scale", 0.7**number), make=row),
    "a dict beside a module": Case(lambda _, model, number: model.listed[1].update(temperature=0.5**number)),
    "a mode set in the loss": Case(inside=at(1, lambda model: setattr(model, "mode", "square")), beside="pp"),
    "a layer's mode set in the loss": Case(
        inside=at(1, lambda model: setattr(model.blocks[1], "scale", 0.3)), beside="pp"
    ),
    "another layer": Case(
        at(1, lambda model: setattr(model, "act", nn.Sigmoid())),
        refused={"pp": "the model was given other modules"},
    ),
    "a hook": Case(
        at(1, lambda model: model.blocks[1].register_forward_hook(lambda *made: made[2] * 0.5)),
        refused={"pp": r"blocks\.1"},
    ),
    "a list of layers": Case(
        at(1, lambda model: model.listed.append(model.blocks[1])),
        refused={"pp": "listed was given other modules"},
    ),
    "a lock": Case(make=locked),
    "a function over a weight": Case(close_over),
}


def train(run: paceline.Run) -> dict[str, Any]:
    """Train all cases, one after the other, in one group of workers."""
    made: dict[str, Any] = {}
    for name, case in CASES.items():
        if case.beside == run._engine.state.options.strategy:
            continue
        own = paceline.Run(run.world, run._engine.state.options)
        try:
            made[name] = _train_one(own, case)
        except InputError as error:
            made[name] = str(error)
        if own._engine.state.replica_or_none is not None:
            own._engine.state.replica.abandon()
    return made


def _train_one(run: paceline.Run, case: Case) -> Any:
    config, seen = case.config(), torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 6, generator=seen), torch.randn(32, generator=seen))
    torch.manual_seed(3)
    model: Any
    model, _ = run.prepare(case.make(config), lambda made: torch.optim.SGD(made.parameters(), lr=0.05))
    number = 0

    def errors(model: Any, batch: list[Tensor]) -> Tensor:
        case.inside(config, model, number)
        scores = model(batch[0])
        wanted = batch[1] if scores.dim() == 1 else batch[1][:, None].expand_as(scores)
        return (scores - wanted).square().flatten()

    def loss(model: Any, batch: list[Tensor]) -> Loss:
        return Loss.mean(errors(model, batch))

    def metrics(model: Any, batch: list[Tensor]) -> dict[str, Mean]:
        scores = model(batch[0])
        return {"scores": Mean(scores.double().sum(), len(scores))}

    for step in run.steps(data, batch_size=8, epochs=1):
        step.compute(loss)
        case.behind(config, model, step.number)
        number += 1
    measured = run.evaluate(data, metrics, batch_size=16)
    return {
        name: value.clone() for name, value in run._engine.state.replica.state()["model"].items()
    }, measured


def launched(strategy: str, workers: int) -> dict[str, Any]:
    first, *_ = paceline.launch(train, strategy=strategy, workers=workers, shards=4, threads=1, device="cpu")
    return first  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return launched("single", 1)


@pytest.mark.parametrize("strategy", ["dp", "pp"])
def test_copies_share_what_one_process_shares(strategy: str, single: dict[str, Any]) -> None:
    wrong = {}
    for name, got in launched(strategy, 2).items():
        words, wanted = CASES[name].refused.get(strategy), single[name]
        assert not isinstance(wanted, str), (name, wanted)
        if words is not None:
            if not isinstance(got, str) or "\n" in got or not re.search(words, got):
                wrong[name] = got if isinstance(got, str) else "was not refused"
        elif isinstance(got, str):
            wrong[name] = got
        elif not all(torch.equal(got[0][key], value) for key, value in wanted[0].items()):
            wrong[name] = "weights differ"
        elif got[1] != wanted[1]:
            wrong[name] = f"metrics differ: {got[1]} {wanted[1]}"
    assert not wrong

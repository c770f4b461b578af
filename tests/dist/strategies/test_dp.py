"""dp: all that is written in Python runs in the order of one process; backward passes of plain layers run beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss
from paceline.errors import InputError
from paceline.strategies.data_parallel import dp


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


class Carrying(nn.Module):
    """Draws from generators of its own, and carries a tensor from pass to pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.growing = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 6)
        self.active = [self.layers[0]]
        self.state = torch.zeros(6)
        self.level, self.draws = 0.0, np.random.default_rng(0)

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.active:
            values = torch.tanh(layer(values)) * float(self.draws.random())
        values = values + self.state
        self.state = values.detach().mean(0)
        self.level = float(self.state.sum())
        return values


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its weights, two layers that share theirs, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm = nn.LSTM(6, 6, batch_first=True), nn.BatchNorm1d(6)
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight

    def forward(self, values: Tensor) -> Tensor:
        out, _ = self.lstm(values[:, None])
        made: Tensor = self.other(self.norm(self.one(out[:, 0])))
        return made


class Squared(torch.autograd.Function):
    """A function whose backward pass is written in Python."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        THREADS.add(threading.current_thread().name)
        (values,) = ctx.saved_tensors
        return 2 * values * gradients[0]


THREADS: set[str] = set()
COMMON: dict[str, Any] = {"threads": 1, "device": "cpu", "micro_batch": 3}
Losses = Callable[[Any, nn.Module, list[Tensor], int], Loss]


def squares(_: Any, model: nn.Module, batch: list[Tensor], __: int) -> Loss:
    return Loss.mean((model(batch[0]) - batch[1]).square().sum(1))


def in_place_and_drawing_later(_: Any, model: nn.Module, batch: list[Tensor], number: int) -> Loss:
    scaled = batch[0].mul_(2).add_(0.3)
    if number > 1:
        scaled = nn.functional.dropout(scaled, 0.3)
    return Loss.mean((model(scaled) - batch[1]).square().sum(1))


def features_of_a_hook(kept: Any, model: nn.Module, batch: list[Tensor], _: int) -> Loss:
    out = model(batch[0])
    return Loss.mean((out - batch[1]).square().sum(1) + kept["features"].square().mean(1))


def kept_model(kept: Any, model: nn.Module, batch: list[Tensor], number: int) -> Loss:
    if number == 2 and len(kept["model"].active) == 1:
        kept["model"].active.append(kept["model"].layers[1])
    out = model(batch[0])
    return Loss.mean((out - batch[1]).square().sum(1) * (1 + kept["model"].level))


def custom_function(_: Any, model: nn.Module, batch: list[Tensor], number: int) -> Loss:
    errors = model(batch[0]) - batch[1]
    return Loss.mean((Squared.apply(errors) if number % 2 else errors.square()).sum(1))  # type: ignore[no-untyped-call]


def two_terms(_: Any, model: nn.Module, batch: list[Tensor], __: int) -> Loss:
    out = model(batch[0])
    main = Loss.mean((out - batch[1]).square().sum(1))
    main.auxiliary["norm"] = Loss(out.square().sum(), 2 * len(out))
    return main


CASES: dict[str, tuple[Callable[[], nn.Module], Losses]] = {
    "plain": (plain, squares),
    "in place": (plain, in_place_and_drawing_later),
    "a hook's closure": (plain, features_of_a_hook),
    "a kept model": (Carrying, kept_model),
    "a function": (plain, custom_function),
    "terms": (plain, two_terms),
    "recurrent": (Recurrent, squares),
}


def train(run: paceline.Run, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        make, losses = CASES[name]
        own = paceline.Run(run.world, run._engine.state.options)
        torch.manual_seed(5)
        made = make()
        kept: dict[str, Any] = {"model": made}
        if losses is features_of_a_hook:
            made[1].register_forward_hook(lambda _, __, out, kept=kept: kept.update(features=out))  # type: ignore[index]
        own.prepare(made, lambda model: torch.optim.AdamW(model.parameters(), lr=0.02))
        seen = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(66, 6, generator=seen), torch.randn(66, 6, generator=seen))
        THREADS.clear()
        for step in own.steps(data, batch_size=22, epochs=2):
            step.compute(
                lambda model, batch, step=step, kept=kept, losses=losses: losses(
                    kept, model, batch, step.number
                )
            )
        found[name] = {**own._engine.state.replica.state()["model"]}, set(THREADS)
    return found


def alone(names: list[str]) -> dict[str, Any]:
    (found,) = paceline.launch(train, names, strategy="single", shards=4, **COMMON)
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return alone(list(CASES))


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [
        name
        for name, (weights, _) in found.items()
        if not all(torch.equal(weights[key], value) for key, value in wanted[name][0].items())
    ]


def test_whatever_python_does_the_bits_are_those_of_one_process(single: dict[str, Any]) -> None:
    (found,) = paceline.launch(train, list(CASES), strategy="dp", workers=3, shards=4, **COMMON)
    assert differing(found, single) == []
    assert found["a function"][1] == {"MainThread"}


def on_pretended_devices(run: paceline.Run, names: list[str]) -> dict[str, Any]:
    dp.other_devices = lambda first, workers: [first] * (workers - 1)
    return train(run, names)


def test_shards_on_other_devices_use_the_same_modules(single: dict[str, Any]) -> None:
    options: dict[str, Any] = {"strategy": "dp", "workers": 3, "shards": 4, **COMMON}
    (found,) = paceline.launch(on_pretended_devices, list(CASES), **options)
    assert differing(found, single) == []


class StageState(nn.Module):
    """Comes to a weight by a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.listed = [self.layer.weight]

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values) @ self.listed[0]


def keep(run: paceline.Run) -> None:
    dp.other_devices = lambda first, workers: [first] * (workers - 1)
    run.prepare(StageState(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(TensorDataset(torch.ones(8, 6), torch.ones(8, 6)), batch_size=8, epochs=1):
        step.compute(lambda model, batch: squares(None, model, batch, 0))


def test_a_weight_of_the_first_device_in_the_pass_of_another_is_refused() -> None:
    with pytest.raises(InputError, match=r"came to layer\.weight on the first one"):
        paceline.launch(keep, strategy="dp", workers=2, shards=4, threads=1, device="cpu")


def where_backward_ran(run: paceline.Run, make: Callable[[], nn.Module]) -> set[str]:
    names: set[str] = set()
    real = dp.gradients.of_leaves

    def watched(*args: Any) -> Any:
        names.add(threading.current_thread().name.rsplit("_", 1)[0])
        return real(*args)

    dp.gradients.of_leaves = watched
    try:
        run.prepare(make(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(TensorDataset(torch.ones(8, 6), torch.ones(8, 6)), batch_size=8, epochs=1):
            step.compute(lambda model, batch: squares(None, model, batch, 0))
    finally:
        dp.gradients.of_leaves = real
    return names


def test_only_backward_passes_of_plain_layers_run_on_threads() -> None:
    options: dict[str, Any] = {"strategy": "dp", "workers": 2, "shards": 4, "threads": 1, "device": "cpu"}
    assert paceline.launch(where_backward_ran, plain, **options) == ({"paceline-dp"},)
    assert paceline.launch(where_backward_ran, Recurrent, **options) == (set(),)


def writing(_: Any, model: Any, batch: list[Tensor], __: int) -> Loss:
    model[0].weight.data.mul_(0.9)
    return squares(None, model, batch, 0)


def write(run: paceline.Run) -> None:
    run.prepare(plain(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(TensorDataset(torch.ones(8, 6), torch.ones(8, 6)), batch_size=8, epochs=1):
        step.compute(lambda model, batch: writing(None, model, batch, 0))


def write_on_pretended_devices(run: paceline.Run) -> None:
    dp.other_devices = lambda first, workers: [first] * (workers - 1)
    dp.only_plain_layers = lambda _: False
    write(run)


def test_weights_that_a_loss_writes_to_while_a_thread_may_read_them_are_refused() -> None:
    options: dict[str, Any] = {"strategy": "dp", "workers": 2, "shards": 4, "threads": 1, "device": "cpu"}
    for job in (write, write_on_pretended_devices):
        with pytest.raises(InputError, match=r"wrote to the weights of 0\.weight"):
            paceline.launch(job, **options)

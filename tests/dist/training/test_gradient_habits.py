"""Work of a loop on gradients is refused wherever they are not the sums of the step: nothing of it is dropped in silence."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError

BEHIND = {
    "clip_grad_norm_": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    "clip of a part": lambda model, _: nn.utils.clip_grad_norm_([model[2].weight], 1e-3),
    "clip of the optimizer's": lambda _, held: nn.utils.clip_grad_norm_(held.param_groups[0]["params"], 0.5),
    "clip_grad_value_": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "scaled": lambda model, _: [one.grad.mul_(0.1) for one in model.parameters() if one.grad is not None],
    "scaled as data": lambda model, _: [
        one.grad.data.mul_(0.1) for one in model.parameters() if one.grad is not None
    ],
    "assigned": lambda model, _: [setattr(one, "grad", torch.zeros_like(one)) for one in model.parameters()],
    "cleared": lambda model, _: model.zero_grad(),
    "a penalty": lambda model, _: (0.1 * model[2].weight.square().sum()).backward(),
    "a pass": lambda model, _: model(torch.ones(3, 4)).sum().backward(),
}
INSIDE = {
    f"{name} inside": BEHIND[name]
    for name in ("clip_grad_norm_", "scaled", "clip of the optimizer's", "a pass", "cleared")
}


def attack(model: nn.Module, features: Tensor) -> None:
    """Look for the gradient of an input as tutorials do, and clear those of the weights."""
    model(features.clone().requires_grad_()).sum().backward()
    model.zero_grad()


def habits(run: paceline.Run, names: list[str]) -> dict[str, Any]:
    """Train a model once for each habit, and return what was said, or the weights."""
    made: dict[str, Any] = {}
    for name in names:
        own = paceline.Run(run.world, run._engine.state.options)
        try:
            made[name] = loop(own, name)
        except InputError as error:
            made[name] = str(error)
        # Whoever is in the step behind still waits for its server's answer: a server that goes takes it along.
        run.world.comm.barrier()
        own._engine.state.replica.abandon()
    return made


def loop(run: paceline.Run, habit: str) -> dict[str, Tensor]:
    seen = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(16, 4, generator=seen), torch.randn(16, 1, generator=seen))
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)
    if habit == "an average":
        AveragedModel(model)
    for step in run.steps(data, batch_size=8, epochs=1):
        late = step.number == 1  # a habit is found in whatever step it begins
        for features, wanted in step:
            if habit == "cleared at the top":
                model.zero_grad()
            if habit == "an attack":
                attack(model, features)
            step.backward((model(features) - wanted).square().flatten())
            if late and habit in INSIDE:
                INSIDE[habit](model, optimizer)
        if late and habit in BEHIND:
            BEHIND[habit](model, optimizer)
        step.apply()
    return {name: value.clone() for name, value in run._engine.state.replica.state()["model"].items()}


def said(strategy: str, names: list[str]) -> list[dict[str, Any]]:
    return list(paceline.launch(habits, names, strategy=strategy, workers=2, shards=4, threads=1))


def test_work_on_gradients_that_lie_in_rows_is_refused() -> None:
    for found in said("fsdp", [*BEHIND, *INSIDE, "an average", "an attack", "cleared at the top", "none"]):
        assert "the model is copied" in found.pop("an average")
        assert "torch.autograd.grad(loss, x)" in found["an attack"]
        cleared, plain = found.pop("cleared at the top"), found.pop("none")
        assert all(torch.equal(cleared[name], value) for name, value in plain.items())
        for name, words in found.items():
            assert re.search(r"step\.(apply|backward)\(", str(words)), (name, words)


def test_work_on_gradients_of_split_layers_is_refused() -> None:
    for found in said("tp", [*BEHIND, *INSIDE, "an average", "an attack"]):
        assert "torch.autograd.grad(loss, x)" in found["an attack"]
        assert [name for name, words in found.items() if not isinstance(words, str)] == []


def test_work_on_a_part_of_the_gradients_is_refused_where_servers_have_them() -> None:
    for found in said("ps", ["clip of a part"]):
        assert "max_grad_norm=1.0" in found["clip of a part"]

"""State of optimizers by name: what is loaded is what was saved, types included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.state.optimizer_state import load_optimizer_state, optimizer_state


class Master(torch.optim.Optimizer):
    """Trains a copy in single precision; keeps numbers of other types, and some inside of lists and dicts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().float().clone()
                    state["count"] = torch.tensor(0)
                    state["inside"] = {"more": [torch.zeros(2, dtype=torch.float64), 3]}
                state["count"] += 1
                state["inside"]["more"][0] += 1 / 3
                state["master"].sub_(parameter.grad.float(), alpha=group["lr"])
                parameter.copy_(state["master"])


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    inputs = torch.linspace(-1, 1, 12).view(4, 3).to(next(model.parameters()).dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def types(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, dict):
        return {key: types(one) for key, one in value.items()}
    return [types(one) for one in value] if isinstance(value, list) else type(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.NAdam(parameters, lr=0.02),
        lambda parameters: torch.optim.ASGD(parameters, lr=0.05, lambd=0.1, t0=2),
        Master,
    ],
    ids=["NAdam", "ASGD", "Master"],
)
def test_training_goes_on_with_the_same_bits_after_a_load(
    make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 2).to(dtype)
    optimizer = make(model.parameters())
    trained(model, optimizer, 3)
    other = copy.deepcopy(model)
    saved = copy.deepcopy(optimizer_state(model, optimizer))
    loaded = make(other.parameters())
    load_optimizer_state(other, loaded, saved)
    there = optimizer_state(other, loaded)["state"]
    assert types(there) == types(saved["state"])
    expected = trained(model, optimizer, 3)
    assert all(map(torch.equal, trained(other, loaded, 3), expected))

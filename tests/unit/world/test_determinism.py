"""What makes passes give the same bits, whatever passes there were before."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.world import determinism


def fusing(features: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(features @ weight) * 1.1 + 0.3) * weight.sum()


def scripted(kind: str) -> Callable[[Tensor], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if kind == "module":
            return torch.jit.script(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()))
        weight, function = torch.randn(6, 16, requires_grad=True), torch.jit.script(fusing)
        return lambda features: function(features, weight)


def passes(kind: str) -> list[Tensor]:
    torch.manual_seed(2)
    model, features = scripted(kind), torch.randn(9, 6)
    made = []
    for _ in range(4):
        given = features.clone().requires_grad_()
        model(given).square().sum().backward()
        assert given.grad is not None
        made.append(given.grad)
    return made


@pytest.mark.parametrize("kind", ["module", "function"])
def test_what_torchscript_computes_does_not_depend_on_how_often_it_was_called(kind: str) -> None:
    before = strategy()
    with determinism.preserved():
        determinism.select_kernels(torch.device("cpu"), compiled=False)
        first, *later = passes(kind)
    assert all(torch.equal(one, first) for one in later)
    assert strategy() == before


def strategy() -> list[tuple[str, int]]:
    """Return how often TorchScript may fuse; it is told only while it is set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = torch.jit.set_fusion_strategy([])
        torch.jit.set_fusion_strategy(found)
    return found

"""Whole gradients that are put together from the rows of all workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import InputError
from paceline.strategies.fsdp.param_groups import _check, whole_tensors


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_norms_are_those_of_one_process(workers: int) -> None:
    """With as many workers as rows each sends one number of a bias, and those lie apart in what all have sent."""
    shapes = [torch.Size(shape) for shape in ((3,), (5, 4), (1,), (3, 1), (4,))]
    whole = [torch.empty(shape) for shape in shapes]
    rows = [one.chunk(workers)[0] for one in whole]
    members: list[Any] = [
        SimpleNamespace(whole_size=one.shape, padded_count=part.numel())
        for one, part in zip(whole, rows, strict=True)
    ]
    for seed in range(100):
        draw = torch.Generator().manual_seed(seed)
        sent = torch.randn(workers, sum(member.padded_count for member in members), generator=draw)
        for made in whole_tensors(list(sent), members):
            assert torch.equal(torch.linalg.vector_norm(made), torch.linalg.vector_norm(made.clone()))
            assert made.is_contiguous()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_with_weights_is_refused_in_one_line() -> None:
    _check(nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU())), {})
    for made in (torch.jit.script(nn.Linear(2, 2)), torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))):
        with pytest.raises(InputError, match=r"^1 comes from torch\.jit\.script .* Use --strategy ddp"):
            _check(nn.Sequential(nn.Linear(2, 2), made), {})
        with pytest.raises(InputError, match=r"^the model comes from"):
            _check(made, {})


def test_a_container_that_nobody_calls_is_refused_in_one_line() -> None:
    model = nn.ModuleDict({"student": nn.Linear(2, 2), "teacher": nn.Linear(2, 2)})
    with pytest.raises(InputError, match=r"nobody calls an nn\.ModuleDict"):
        _check(model, {})

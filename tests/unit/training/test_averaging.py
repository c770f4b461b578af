"""Averages of weights are torch's, and stand in their place only while something is measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline.declared import Average
from paceline.errors import InputError
from paceline.state.chunks import AVERAGE as SLOT
from paceline.training.averaging import keep_average


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(
    "average", [Average(0.9), Average(None, start=2), Average(0.5, start=1, every=2), Average(None, every=3)]
)
def test_averages_are_those_of_torch(kind: type[torch.optim.Optimizer], average: Average) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    late = nn.Linear(2, 1, bias=False)  # gets its gradients from the fourth step on
    rare = nn.Linear(2, 1, bias=False)  # gets one in the first step and one in the last
    whole = nn.ModuleList([model, late, rare])
    taken = [0]
    optimizer = keep_average(kind(whole.parameters(), lr=0.1), average, lambda: taken[0])
    rule = None if average.decay is None else get_ema_multi_avg_fn(average.decay)
    expected = AveragedModel(whole, multi_avg_fn=rule)
    for step in range(1, 9):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 3)).square().sum()
        loss = loss + (late(torch.ones(2)).sum() if step > 3 else 0)
        (loss + (rare(torch.ones(2)).sum() if step in (1, 8) else 0)).backward()
        optimizer.step()
        taken[0] = step
        if step > average.start and (step - average.start) % average.every == 0:
            expected.update_parameters(whole)
    for mine, theirs in zip(whole.parameters(), expected.module.parameters(), strict=True):
        found = optimizer.state[mine][SLOT]
        if rule is None:
            torch.testing.assert_close(found, theirs.data)
        else:
            assert torch.equal(found, theirs)


@pytest.mark.parametrize(
    "wrong",
    [
        {"decay": 1.0},
        {"decay": -0.1},
        {"start": -1},
        {"every": 0},
        {"every": True},
        {"decay": False},
        {"evaluated": "no"},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="Average: "):
        Average(**wrong)  # type: ignore[arg-type]

"""Every strategy of several workers passes the points of a step at which `paceline chaos` sets off faults."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.world.fault_points import STEP_POINTS, set_fault


def passed(run):
    points = set()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    set_fault(points.add)
    try:
        for step in run.steps(TensorDataset(torch.ones(8, 4)), batch_size=8, steps=1):
            step.compute(lambda model, batch: paceline.Loss.mean(model(batch[0]).flatten()))
    finally:
        set_fault(None)
    return points


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pp", "ps"])
def test_a_step_passes_every_point(strategy):
    found = paceline.launch(passed, workers=2, threads=1, device="cpu", strategy=strategy)
    assert set().union(*found) == set(STEP_POINTS)

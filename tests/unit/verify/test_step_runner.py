"""An experiment on a step leaves the model as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.task import Loss, Task
from paceline.training.options import RunOptions
from paceline.verify.proof.lab.step_runner import StepRunner


class Squares(Task):
    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss.mean(model(batch).square())


def test_measuring_leaves_a_frozen_layer_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    world = SimpleNamespace(device=torch.device("cpu"))
    harness: Any = SimpleNamespace(task=Squares(), options=RunOptions(), run=SimpleNamespace(world=world))
    replica: Any = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    runner = StepRunner(harness, replica, size=4)
    assert runner.measure(torch.ones(4, 2))[1] == 8
    assert (model.training, model[0].training, model[1].training) == (True, True, False)

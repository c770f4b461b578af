"""`paceline.load` says which checkpoint it could not take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import CheckpointError
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import PART, run_state


class WithBackbone(paceline.Task):
    """Holds a part of the model that it makes."""

    batch_size, epochs = 4, 1

    def __init__(self) -> None:
        self.backbone = nn.Linear(2, 3)

    def model(self) -> nn.Module:
        return nn.Sequential(self.backbone, nn.Linear(3, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.ones(16, 2))

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> paceline.Loss:
        return paceline.Loss.mean(model(batch[0])[:, 0])


def test_models_that_are_loaded_share_nothing_with_the_task_or_with_one_another(tmp_path: Path) -> None:
    task = WithBackbone()
    first = task.backbone.weight.detach().clone()
    result = paceline.train(task, strategy="single", out=tmp_path / "run", save_every=2, keep=9)
    early, late = paceline.load(tmp_path / "run", step=2, task=task), result.model()
    assert torch.equal(task.backbone.weight, first)
    weights = [one[0].weight for one in (early, late, paceline.load(tmp_path / "run", task=task))]
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])


class Other(paceline.Task):
    """A model of another shape than the one that was saved."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)


def test_a_newer_checkpoint_that_is_damaged_is_told(tmp_path: Path) -> None:
    for step in (1, 2):
        Checkpoints(tmp_path / "checkpoints").save(step, run_state(step))
    os.truncate(tmp_path / "checkpoints" / "step-2" / PART, 5)
    with (
        pytest.warns(UserWarning, match=r"passed over .*step-2: .* bytes short"),
        pytest.raises(CheckpointError, match="step-1 are not those of the model"),
    ):
        paceline.load(tmp_path, task=Other)

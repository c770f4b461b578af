"""`paceline.load` says which checkpoint it could not take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

import paceline
from paceline.errors import CheckpointError
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import PART, run_state


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

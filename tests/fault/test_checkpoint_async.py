"""A worker that is killed while its part of a checkpoint is written beside the training."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import load, weights_sha256
from paceline.world import fault_points
from tests.checkpoints import Checkpoints

STEPS = 9


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))


def loss(made: nn.Module, batch: list[torch.Tensor]) -> paceline.Loss:
    return paceline.Loss.mean(made(batch[0]).squeeze(-1).square())


def train(run: paceline.Run, folder: str, deadly: int | None = None) -> str:
    """Train to the end; the second worker dies when its part of its save number `deadly` is written, not yet sealed."""
    written = []

    def trap(point: str) -> None:
        if point == fault_points.CHECKPOINT and run.world.rank == 1:
            written.append(point)
            mark = Path(folder) / "killed"
            if len(written) == deadly and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    run._engine.preparation.prepare_replica(model, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    fault_points.set_fault(trap)
    data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(4)))
    for step in run.steps(data, batch_size=8, steps=STEPS):
        step.compute(loss)
    fault_points.set_fault(None)
    return weights_sha256(run._engine.state.replica.state()["model"])


@pytest.fixture(scope="module")
def alone() -> str:
    return str(paceline.launch(train, "", strategy="single", shards=4, threads=1, device="cpu")[0])


@pytest.mark.parametrize("elastic", [False, True], ids=["ends and is resumed", "goes on by itself"])
def test_death_while_a_part_is_written(elastic: bool, alone: str, tmp_path: Path) -> None:
    options = {
        "strategy": "fsdp",
        "workers": 2,
        "shards": 4,
        "threads": 1,
        "device": "cpu",
        "out": tmp_path / "run",
        "save_every": "2",
        "save_async": True,
        "elastic": elastic,
    }
    folder = tmp_path / "run" / "checkpoints"
    if elastic:
        ends = paceline.launch(train, str(tmp_path), 2, **options)
    else:
        with pytest.raises(paceline.PacelineError, match="SIGKILL"):
            paceline.launch(train, str(tmp_path), 2, **options)
        # The second save never had all its seals, and the first was whole before the second began.
        assert [path.name for path in Checkpoints(folder).committed()] == ["step-2"]
        assert load(folder / "step-2").step == 2
        ends = paceline.launch(train, str(tmp_path), **options, resume=True)
    assert (tmp_path / "killed").exists()
    assert set(ends) == {alone}
    assert load(folder / f"step-{STEPS}").step == STEPS
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []

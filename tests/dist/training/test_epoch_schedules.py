"""A Task whose schedule goes on once an epoch, or by a metric: the same rates on any workers, resumed, and after a fault."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

import paceline
from paceline.training import trainer
from paceline.training.spec import TrainSpec


class Fit(paceline.Task):
    batch_size = 16
    epochs = 4

    def __init__(self, kind: str = "metric", folder: str = "") -> None:
        self.kind, self.mark = kind, Path(folder) / "killed" if folder else None

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int | None) -> Any:
        if self.kind == "epoch":
            return paceline.PerEpoch(StepLR(optimizer, 1, 0.5))
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return plateau if self.kind == "bare" else paceline.OnMetric(plateau, "error")

    def train_data(self) -> TensorDataset:
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True).tanh())

    def eval_data(self) -> TensorDataset | None:
        return None if self.kind == "unmeasured" else self.train_data()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> paceline.Loss:
        return paceline.Loss.mean((model(batch[0]) - batch[1]).square().flatten())

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, paceline.Mean]:
        if (
            self.mark is not None
            and self.steps_done == 6
            and int(os.environ["RANK"]) == 1
            and not self.mark.exists()
        ):
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)  # in the evaluation at the end of the second epoch
        return {"error": paceline.Mean((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))}


Trained = tuple[str, float]


def train(run: paceline.Run, kinds: list[str], folder: str, options: dict[str, Any]) -> list[Trained]:
    """Train one task after the other in the same world, each in a run of its own."""
    found = []
    for kind in kinds:
        settings = {"kind": kind, **({"folder": folder} if folder else {})}
        own = run if folder or options else paceline.Run(run.world, replace(run._engine.state.options))
        result = trainer.main(
            own, TrainSpec(task=f"{__name__}:Fit", name="fit", settings=settings, **options)
        )
        rate = own._engine.state.replica.optimizer.param_groups[0]["lr"]
        found.append((result["weights_sha256"], rate))
    return found


def launch(
    kinds: list[str], folder: str = "", options: dict[str, Any] | None = None, **more: Any
) -> list[Trained]:
    found = paceline.launch(train, kinds, folder, options or {}, shards=4, threads=1, device="cpu", **more)
    assert all(one == found[0] for one in found)
    return list(found[0])


def test_rates_by_epoch_and_by_metric(tmp_path: Path) -> None:
    one = launch(["epoch", "metric"], strategy="single", workers=1)
    assert [rate for _, rate in one] == [0.1 / 16, one[1][1]]
    assert one[1][1] < 0.1
    assert launch(["epoch", "metric"], strategy="fsdp", workers=2) == one
    killed = launch(["metric"], str(tmp_path), strategy="ddp", workers=3)
    assert (tmp_path / "killed").exists()
    assert killed == one[1:]
    out = tmp_path / "run"
    launch(["metric"], options={"steps": 7}, strategy="ddp", workers=2, out=out)
    assert launch(["metric"], options={"epochs": 4}, workers=1, out=out, resume=True) == one[1:]


def test_what_nobody_would_tell_it_is_refused() -> None:
    for kind, words in (
        ("bare", r"paceline\.OnMetric\(scheduler, \"loss\"\)"),
        ("unmeasured", "nothing was measured at the end of the epoch"),
    ):
        with pytest.raises(paceline.InputError, match=words):
            launch([kind], strategy="single", workers=1)


def test_a_proof_goes_beyond_an_epoch() -> None:
    """Three steps an epoch: the schedule is told the metric between them, as in training."""
    report = paceline.verify(f"{__name__}:Fit", strategy="ddp", workers=2, steps=4, shards=2, resume=False)
    assert report.holds

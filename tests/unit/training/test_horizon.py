"""The schedule of a run is laid out once: a resumed run goes on with it, and stays at its end where it has come there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset

from paceline import Loss, Task
from paceline.checkpoint.manifest import Manifest
from paceline.errors import InputError
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from tests.unit.training.own_runs import data, losses, opened, resumed


class Scheduled(Task):
    """Three steps an epoch, and a rate that falls to zero by the last of them."""

    batch_size = 8
    epochs = 2
    rates: ClassVar[list[float]] = []

    def __init__(self, kind: str = "linear") -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.made = torch.optim.SGD(model.parameters(), lr=1.0)
        return self.made

    def scheduler(self, optimizer: Any, total_steps: int | None) -> Any:
        if self.kind == "cycle":
            return lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total_steps)
        return lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)  # type: ignore[operator]

    def train_data(self) -> Any:
        return data()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        self.rates.append(round(self.made.param_groups[0]["lr"], 6))
        return Loss.mean(losses(model, batch))


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([data()[index] for index in range(24)])


class Streamed(Scheduled):
    def train_data(self) -> Any:
        return _Stream()


def train(run: Any, name: str = "Scheduled", **spec: Any) -> list[float]:
    Scheduled.rates.clear()
    trainer.main(run, TrainSpec(task=f"tests.unit.training.test_horizon:{name}", name=name, **spec))
    return list(Scheduled.rates)


LINEAR = [round(1 - step / 6, 6) for step in range(6)]


@pytest.mark.parametrize("kind", ["linear", "cycle"])
def test_a_resumed_run_goes_on_with_the_schedule_it_has(kind: str, tmp_path: Path) -> None:
    settings = {"kind": kind}
    with opened() as run:
        whole = train(run, settings=settings)
    with opened(out=tmp_path) as run:
        begun = train(run, settings=settings, steps=2)
    with resumed(tmp_path) as run:
        rest = train(run, settings=settings, epochs=2)
    assert begun + rest == whole
    if kind == "linear":
        assert whole == LINEAR
    with resumed(tmp_path) as run:  # and beyond its end, where it stays
        beyond = train(run, settings=settings, steps=12)
    assert len(beyond) == 6
    assert set(beyond) == ({0.0} if kind == "linear" else {beyond[0]})
    with resumed(tmp_path) as run, pytest.raises(InputError, match=r"--horizon 20: .* laid out for 6 steps"):
        train(run, settings=settings, steps=20, horizon=20)


def test_a_run_that_is_longer_than_its_horizon(tmp_path: Path) -> None:
    with opened() as run:
        assert train(run, horizon=3) == [1.0, 0.666667, 0.333333, 0.0, 0.0, 0.0]


def test_a_stream_has_no_end_that_a_schedule_could_know() -> None:
    with opened() as run, pytest.raises(InputError, match=r"total_steps is None.*--steps N or --horizon N"):
        train(run, "Streamed")
    with opened() as run:
        assert train(run, "Streamed", horizon=6) == LINEAR
    with opened() as run:
        assert train(run, "Streamed", steps=6) == LINEAR


class Cosine(Streamed):
    def scheduler(self, optimizer: Any, total_steps: int | None) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)  # type: ignore[arg-type]


def test_nor_one_that_fails_only_when_it_is_stepped() -> None:
    said = r"CosineAnnealingLR\.step\(\) failed.*total_steps is None.*--steps N or --horizon N"
    with opened() as run, pytest.raises(InputError, match=said):
        train(run, "Cosine")
    with opened() as run:
        train(run, "Cosine", horizon=6)


def test_a_checkpoint_that_does_not_say_how_long_its_schedule_is(tmp_path: Path) -> None:
    with opened(out=tmp_path) as run:
        begun = train(run, steps=2)
    (folder,) = (tmp_path / "checkpoints").glob("step-*")
    written = Manifest.read(folder)
    meta = {key: value for key, value in written.meta.items() if key != "horizon"}
    replace(written, meta=meta).write(folder)
    with (
        resumed(tmp_path) as run,
        pytest.raises(InputError, match=r"--horizon N.*\(12 by the present options\)"),
    ):
        train(run, epochs=4)
    with resumed(tmp_path) as run:
        assert begun + train(run, epochs=2, horizon=6) == LINEAR

"""A number that changes with every pass is told; what a task only holds is not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.observe import Note
from paceline.training.spec import TrainSpec
from paceline.training.trainer import Trainer
from tests.unit.training.own_runs import opened
from tests.zoo.tasks.base import Small


class Counting(Small):
    def __init__(self) -> None:
        self.lr, self.calls = 0.01, 0

    def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
        self.calls += 1
        return super().loss(model, batch)


class _Passes(nn.Sequential):
    passes = 0

    def forward(self, features: Tensor) -> Any:
        self.passes += 1
        return super().forward(features)


class Passing(Small):
    def model(self) -> nn.Module:
        return _Passes(*super().model())


class Switching(Small):
    """Numbers that do not change, and a mode that does."""

    best = float("nan")

    def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
        model[1].eval()  # type: ignore[index]
        return super().loss(model, batch)


class Told(Small):
    seen: tuple[int, ...] = ()

    def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
        self.seen = (*self.seen, self.steps_done)
        return super().loss(model, batch)


def notes(task: paceline.Task, shards: int = 2) -> list[str]:
    """Train three steps and return what was noted."""
    with opened(shards=shards) as run:
        told: list[str] = []
        emit = run._engine.state.emit
        run._engine.state.emit = lambda event: (
            told.append(event.text) if isinstance(event, Note) else None,
            emit(event),
        )[1]  # type: ignore[method-assign]
        Trainer(task, TrainSpec(task="told", name="told", steps=3), run).train()
        return told


@pytest.mark.parametrize(("task", "name"), [(Counting, "task.calls"), (Passing, "passes")])
def test_a_number_that_counts_passes_is_told_once(task: type[Small], name: str) -> None:
    (text,) = notes(task())
    assert f"changes the number {name} from pass to pass (1 before, 2 after)" in text
    assert "task.steps_done" in text


def test_what_counts_nothing_is_not_told() -> None:
    assert notes(Switching()) == []


class Freezing(Small):
    """A mode that is switched once, in the third step."""

    def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
        if self.steps_done == 2:
            model[2].eval()  # type: ignore[index]
        return super().loss(model, batch)


def test_a_mode_that_is_switched_on_the_way_is_told() -> None:
    (text,) = notes(Freezing())
    assert "loss() or a hook switched 2 to evaluation mode in step 2" in text


def test_a_copy_of_a_module_asks_the_task_itself_how_far_the_run_is() -> None:
    task, module = Told(), nn.Linear(6, 3)
    module.task = task  # type: ignore[assignment]
    assert copy.deepcopy(module).task is task


def test_with_one_shard_it_counts_steps_and_nothing_is_said() -> None:
    assert notes(Counting(), shards=1) == []


class Reading(Small):
    """A data set that looks at the steps."""

    def train_data(self) -> Any:
        return [(self, number) for number in range(24)]

    @staticmethod
    def collate(samples: Any) -> list[Any]:  # type: ignore[override]
        return [torch.full((len(samples), 6), 1.0 + samples[0][0].steps_done), torch.arange(len(samples)) % 3]

    def eval_data(self) -> None:
        return None


def test_what_reads_data_sees_the_steps_after_a_resume_too(tmp_path: Path) -> None:
    def trained(task: Small, steps: int, num_workers: int = 0, **options: Any) -> Any:
        spec = TrainSpec(task="reading", name="reading", steps=steps, overrides={"num_workers": num_workers})
        with opened(shards=2, **options) as run:
            return Trainer(task, spec, run).train()

    whole = trained(Reading(), 5)
    trained(Reading(), 2, out=tmp_path)
    assert trained(Reading(), 5, out=tmp_path, resume=True)["weights_sha256"] == whole["weights_sha256"]
    with pytest.raises(paceline.InputError, match=r"task.steps_done was read in a loading process"):
        trained(Reading(), 2, num_workers=1)


def test_the_task_knows_the_steps_and_that_is_no_counter() -> None:
    task = Told()
    assert notes(task) == []
    assert task.seen[:6] == (0, 0, 1, 1, 2, 2)
    assert set(task.seen[6:]) == {3}, "the evaluation comes behind the third step"

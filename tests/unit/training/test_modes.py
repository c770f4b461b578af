"""A switch that a loss throws once is told of: workers without a sample in that step, and later ones, do not see it."""

from __future__ import annotations

from torch import nn

from paceline import CheckpointInfo, Task
from paceline.training.checks.counters import Modes


class Net(nn.Module):
    """A model with a switch and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mode, self.calls = nn.Linear(2, 2), "warm", 0


def test_a_switch_is_told_of_once_where_it_is_thrown() -> None:
    task, model, modes = Task(), Net(), Modes()
    model.mode = "first"  # before the first step ends: every worker begins with it
    assert modes.note_of_change(task, model, 0) is None
    model.calls += 1
    assert modes.note_of_change(task, model, 1) is None
    model.mode = "cold"
    said = modes.note_of_change(task, model, 2) or ""
    assert "switched mode of the model from 'first' to 'cold' in step 2" in said
    assert "task.steps_done" in said
    assert modes.note_of_change(task, model, 3) is None
    task.sharp = True  # type: ignore[attr-defined]
    assert modes.note_of_change(task, model, 4) is None  # made anew: there was nothing to switch
    task.sharp = False  # type: ignore[attr-defined]
    assert "sharp of the task" in (modes.note_of_change(task, model, 5) or "")
    task.sharp = True  # type: ignore[attr-defined]
    assert modes.note_of_change(task, model, 5) is None  # told once
    model.layer.eval()
    assert "layer to evaluation mode" in (modes.note_of_change(task, model, 6) or "")


class Sorted(Task):
    """A task with a switch of its class."""

    kind = "a"


def test_a_switch_of_the_class() -> None:
    task, model, modes = Sorted(), Net(), Modes()
    assert modes.note_of_change(task, model, 0) is None
    task.kind = "b"
    assert "kind of the task from 'a' to 'b'" in (modes.note_of_change(task, model, 1) or "")


class Keeping(Task):
    """A task that keeps where its last checkpoint lies, on the worker that commits it."""

    last = None

    def on_checkpoint(self, info: CheckpointInfo) -> None:
        self.last = str(info.path)  # type: ignore[assignment]


def test_what_on_checkpoint_keeps_differs_between_workers() -> None:
    task, model, modes = Keeping(), Net(), Modes()
    assert modes.note_of_change(task, model, 0) is None
    task.on_checkpoint(CheckpointInfo(step=1, path="a"))
    said = modes.note_of_change(task, model, 1) or ""
    assert "on_checkpoint switched last of the task from None to 'a' in step 1" in said
    assert "the one worker that commits" in said
    assert "in a hook" not in said

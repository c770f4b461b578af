"""A name in a task that is nearly one of Task's own."""

from __future__ import annotations

from typing import Any

from paceline.task import Task
from paceline.training.checks.before_first_step import near_names


class Slip(Task):
    batchsize = 64
    train_dataset: Any = None
    hidden = 3

    def metric(self) -> None:
        """Measured by nobody."""

    def _epoch(self) -> None:
        """Private: meant for the class itself."""


class Fine(Task):
    batch_size = 64
    learning_rate = 0.1


def test_what_is_nearly_a_name_of_a_task_is_noted() -> None:
    assert near_names(Slip.__new__(Slip)) == [
        "paceline does not read Slip.batchsize; batch_size is what it reads.",
        "paceline does not read Slip.metric; metrics is what it reads.",
    ]
    assert near_names(Fine.__new__(Fine)) == []

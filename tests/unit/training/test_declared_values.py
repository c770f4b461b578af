"""What a task declares is compared by value, and what cannot be compared is left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from paceline import Average, Task
from paceline.errors import InputError
from paceline.training.checks.declared_values import DeclaredValues


class Made(Task):
    """A task whose values are made anew each time they are read."""

    decay = 0.9

    @property
    def average(self) -> Average:  # type: ignore[override]
        return Average(self.decay)

    @property
    def worker_init_fn(self) -> Callable[[int], None]:  # type: ignore[override]
        return lambda _: None

    @property
    def batch_size(self) -> Any:  # type: ignore[override]
        return np.array([4, 4])

    def collate(self, items: Sequence[Any]) -> Any:  # type: ignore[override]
        return items


def test_equal_values_are_the_same_however_they_are_made() -> None:
    task = Made()
    declared = DeclaredValues(task)
    declared.check()
    task.epochs = 1  # what it was
    declared.check()
    task.decay = 0.5
    with pytest.raises(
        InputError, match=r"average of Made .* \(from Average\(decay=0.9, .* to Average\(decay=0.5"
    ):
        declared.check()

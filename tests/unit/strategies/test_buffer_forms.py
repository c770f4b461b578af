"""A buffer has one shape and type for the whole run: what forward makes of it otherwise is refused in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline import Run
from paceline.errors import InputError
from tests.unit.training.own_runs import data, losses, opened


class Seen(nn.Module):
    """Does something to its buffer in forward."""

    def __init__(self, change: Callable[[nn.Module, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 1), change
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, values: Tensor) -> Tensor:
        self.change(self, values)
        made: Tensor = self.layer(values)
        return made


def append(model: nn.Module, values: Tensor) -> None:
    model.seen = torch.cat([model.seen, values.detach()])  # type: ignore[arg-type]


def widen(model: nn.Module, _: Tensor) -> None:
    model.seen = model.seen.double()  # type: ignore[operator]


def remove(model: nn.Module, _: Tensor) -> None:
    model.seen = None


def register(model: nn.Module, _: Tensor) -> None:
    model.register_buffer("late", torch.ones(2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (append, r"seen went from float32\[0, 4\] to float32\[4, 4\]"),
        (widen, r"seen went from float32\[0, 4\] to float64\[0, 4\]"),
        (remove, "seen was taken away"),
        (register, "late was registered"),
    ],
)
def test_another_form_is_refused(change: Callable[[nn.Module, Tensor], None], said: str) -> None:
    with opened(shards=2) as run:
        model = Seen(change)
        made, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(
            InputError, match=f"^the buffer {said} in forward.*in __init__ with its full size"
        ):
            train(run, made)


def train(run: Run, model: nn.Module) -> None:
    for step in run.steps(data(), batch_size=8, epochs=1):
        for batch in step:
            step.backward(losses(model, batch))
        step.apply()


def test_a_buffer_that_nothing_changes_is_not_written_to_behind_the_first_step() -> None:
    """Whoever counts the writes of several steps, as local-sgd does, would take it for one that began to change."""

    def train(run: Run) -> list[int]:
        model = Seen(lambda *_: None)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        versions = []
        for step in run.steps(data(), batch_size=4, epochs=1):
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
            versions.append(model.seen._version)  # type: ignore[operator,union-attr]
        return versions

    with opened(shards=2) as run:
        assert len(set(train(run))) == 1

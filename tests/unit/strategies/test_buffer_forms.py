"""A buffer has one shape and type for the whole run: what forward makes of it otherwise is refused in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline import Mean, Run
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
            InputError,
            match=f"^the buffer {said} in forward or between two steps.*in __init__ with its full size",
        ):
            train(run, made)


def train(run: Run, model: nn.Module, behind: Callable[[int], None] = lambda _: None) -> None:
    for step in run.steps(data(48), batch_size=8, epochs=1):
        for batch in step:
            step.backward(losses(model, batch))
        step.apply()
        behind(step.number)


@pytest.mark.parametrize("at", [1, 2])
def test_a_buffer_that_a_loop_takes_away_between_two_steps_is_refused(at: int) -> None:
    """Also before a step that compares all buffers by value, which the fourth one is."""
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 1))
    with opened(shards=2) as run:
        made, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def take_away(number: int) -> None:
            if number == at:
                norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None

        with pytest.raises(InputError, match=r"running_mean was taken away in forward or between two steps"):
            train(run, made, take_away)


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


class LocalState(nn.Module):
    """Has one buffer, or a name for one, that forward may set."""

    def __init__(self, value: Tensor | None, change: Callable[[nn.Module, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 1), change
        self.register_buffer("held", value)

    def forward(self, values: Tensor) -> Tensor:
        self.change(self, values)
        made: Tensor = self.layer(values)
        return made


def fill(model: nn.Module, values: Tensor) -> None:
    model.held = values.detach().mean(0)


def late(model: nn.Module, _: Tensor) -> None:
    if "late" not in dict(model.named_buffers()):
        model.register_buffer("late", torch.ones(2))


@pytest.mark.parametrize("made", ["held", "late"])
def test_a_buffer_that_forward_makes_is_refused_where_the_model_has_no_other(made: str) -> None:
    model: nn.Module = LocalState(None, fill) if made == "held" else Late()
    with opened(shards=2) as run:
        prepared, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(InputError, match=f"^the buffer {made} was registered in forward"):
            train(run, prepared)


class Late(nn.Module):
    """Has no buffer until its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, values: Tensor) -> Tensor:
        late(self, values)
        made: Tensor = self.layer(values)
        return made


def test_a_name_without_a_buffer_has_none_behind_an_evaluation() -> None:
    model = LocalState(None, fill)
    with opened(shards=2) as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.evaluate(data(), lambda made, batch: {"mean": Mean(made(batch[0]).sum(), 1)}, batch_size=4)
    assert model.held is None


def test_nan_is_the_same_on_every_shard() -> None:
    model = LocalState(torch.tensor([1.0, float("nan")]), lambda *_: None)
    with opened(shards=2) as run:
        prepared, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        train(run, prepared)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.eye(3).to_sparse(), r"held is a sparse tensor \(sparse_coo\).*indices and values"),
        (torch.zeros(1).expand(3), r"held is expanded.*held\.clone\(\)"),
    ],
)
def test_memory_that_nobody_can_load_is_refused_before_the_first_step(value: Tensor, said: str) -> None:
    model = LocalState(value, lambda *_: None)
    with opened(shards=2) as run, pytest.raises(InputError, match=f"^{said}"):
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_what_is_expanded_by_sides_of_one_number_is_trained() -> None:
    model = LocalState(torch.arange(3.0).expand(1, -1), lambda *_: None)
    with opened(shards=2) as run:
        prepared, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        train(run, prepared)


def test_one_that_keeps_its_value_at_first_is_followed() -> None:
    """The vector of a spectral norm over one output is one number, 1 or -1 up to rounding."""
    with opened(shards=2) as run:
        torch.manual_seed(0)
        head = nn.utils.spectral_norm(nn.Linear(8, 1))
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), head)
        made, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with torch.no_grad():
            head.weight_u.fill_(1.0)
        for step in run.steps(data(), batch_size=8, steps=6):
            if step.number == 3:
                with torch.no_grad():
                    head.weight_u.fill_(-1.0)  # as rounding may at any step
            for batch in step:
                step.backward(losses(made, batch))
            step.apply()

"""A registered state that is changed with each batch would be saved as no other number of workers has it: it is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError

SAID = "changes the state 'seen' of run.register"


def train(run: paceline.Run, habit: str) -> object:
    torch.manual_seed(0)
    made = nn.Linear(4, 1)
    model, _ = run.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
    seen = {"n": 0, "rows": []}
    run.register("seen", seen)
    for step in run.steps(TensorDataset(torch.ones(24, 4)), batch_size=8, epochs=1):
        for (x,) in step:
            step.backward(model(x).square().flatten())
            if habit == "counted in each batch":
                seen["n"] += len(x)
            elif habit == "kept in each batch":
                seen["rows"].append(len(x))
            elif habit == "set alike in each batch":
                seen["n"] = step.number
        seen["n"] += step.apply().size
    return seen


EACH = ("counted in each batch", "kept in each batch")


@pytest.mark.parametrize("habit", EACH)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_state_that_is_changed_with_each_batch_is_refused(workers: int, habit: str) -> None:
    with pytest.raises(InputError, match=SAID):
        paceline.launch(train, habit, workers=workers, shards=4, threads=1)


@pytest.mark.parametrize("habit", ["set alike in each batch", "counted once a step"])
def test_one_that_is_not_is_that_of_one_process(habit: str) -> None:
    alone = paceline.launch(train, habit, workers=1, shards=4, threads=1)
    assert paceline.launch(train, habit, workers=2, shards=4, threads=1) == alone * 2


def test_where_each_worker_has_one_batch_it_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    paceline.launch(train, EACH[0], workers=2, shards=2, threads=1)
    shown = " ".join(capfd.readouterr().err.split())
    assert shown.count(SAID) == 1
    paceline.launch(train, "counted once a step", workers=2, shards=2, threads=1)
    assert SAID not in " ".join(capfd.readouterr().err.split())


def ticking(run: paceline.Run, habit: str) -> None:
    made = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, schedule = run.prepare(made, optimizer, schedule)
    for step in run.steps(TensorDataset(torch.ones(24, 4)), batch_size=8, epochs=1):
        for (x,) in step:
            step.backward(model(x).square().flatten())
            if habit == "a tick":
                schedule.step()
            elif habit == "a rate" or (habit == "a rate later" and step.number == 2):
                optimizer.param_groups[0]["lr"] *= 0.9
        step.apply()


TICKS = {
    "a tick": "calls step() of the ExponentialLR",
    "a rate": "changes the optimizer's options (lr, ...)",
    "a rate later": "changes the optimizer's options (lr, ...)",
}


@pytest.mark.parametrize("habit", TICKS)
def test_a_rate_that_is_set_with_each_batch_is_named_as_what_sets_it(
    habit: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=re.escape(f"the loop {TICKS[habit]} with each batch")):
        paceline.launch(ticking, habit, workers=1, shards=2, threads=1)
    capfd.readouterr()
    paceline.launch(ticking, habit, workers=2, shards=2, threads=1)
    shown = " ".join(capfd.readouterr().err.split())
    assert shown.count("inside `for batch in step`") == 1
    assert f"the loop {TICKS[habit]} inside" in shown


def test_one_shard_has_all_batches() -> None:
    assert paceline.launch(train, EACH[0], workers=1, shards=1, threads=1)[0]["n"] == 48

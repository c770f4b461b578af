"""A registered state that is changed with each batch would be saved as no other number of workers has it: it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError

SAID = "changes the state 'seen' of run.register inside `for batch in step`"


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


def test_one_shard_has_all_batches() -> None:
    assert paceline.launch(train, EACH[0], workers=1, shards=1, threads=1)[0]["n"] == 48

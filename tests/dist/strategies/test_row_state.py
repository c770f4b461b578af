"""A loop that edits what the optimizer keeps: the bits of one process, or one line where it asks under another tensor's name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError

Edit = Callable[[nn.Module, torch.optim.Optimizer], None]


def emptied(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for weight in model[2].parameters():  # type: ignore[index]
        optimizer.state[weight] = {}


def taken_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for weight in model[2].parameters():  # type: ignore[index]
        optimizer.state.pop(weight, None)


def asked_for(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for weight in model.parameters():
        if weight in optimizer.state:
            optimizer.state[weight]["exp_avg"].zero_()


def read(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for weight in model.parameters():
        optimizer.state[weight]["exp_avg"].zero_()


def got(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for weight in model.parameters():
        optimizer.state.get(weight, {}).clear()


def of_groups(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for rows in group["params"]:
            if rows in optimizer.state:
                optimizer.state[rows]["exp_avg"].zero_()


def of_values(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for entry in copy.deepcopy(optimizer.state).values():
        assert entry.keys() == {"step", "exp_avg", "exp_avg_sq"}
    for entry in optimizer.state.values():
        entry["exp_avg_sq"].mul_(0.5)


def cleared(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.state.clear()


BY_NAME: tuple[Edit, ...] = (emptied, taken_out, asked_for, read, got)
BY_ROWS: tuple[Edit, ...] = (of_groups, of_values, cleared)


def train(run: paceline.Run, edit: Edit) -> str:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    model, optimizer = run.prepare(made, torch.optim.Adam(made.parameters(), lr=0.05))
    rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    for step in run.steps(TensorDataset(rows), batch_size=8, epochs=1):
        if step.number == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        if step.number == 2:
            edit(model, optimizer)
        for (x,) in step:
            step.backward(model(x).square().flatten())
        step.apply()
    return run.weights_sha256()


def edits(run: paceline.Run) -> dict[str, Any]:
    made = {}
    for edit in (*BY_NAME, *BY_ROWS):
        own = paceline.Run(run.world, run._engine.state.options)
        try:
            made[edit.__name__] = train(own, edit)
        except InputError as error:
            made[edit.__name__] = str(error)
        run.world.comm.barrier()
        own._engine.state.replica.abandon()
    return made


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_an_optimizer_keeps_may_be_edited_or_it_is_said(strategy: str) -> None:
    alone = paceline.launch(edits, shards=4, threads=1)[0]
    assert len(set(alone.values())) > len(BY_ROWS)
    for found in paceline.launch(edits, workers=2, shards=4, threads=1, strategy=strategy):
        for name, value in found.items():
            if strategy == "fsdp" and name in {edit.__name__ for edit in BY_NAME}:
                assert "in optimizer.state, but under fsdp" in value, name
            else:
                assert value == alone[name], name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"strategy": "ddp", "shard_optimizer": True},
            "under shard_optimizer=True another worker updates it",
        ),
        ({"strategy": "ps", "servers": 1}, "under ps a server updates it"),
    ],
    ids=["zero-1", "ps"],
)
def test_state_that_another_worker_keeps_is_asked_for_in_vain_in_one_line(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        paceline.launch(train, read, workers=2, shards=2, threads=1, **options)


def test_what_a_worker_keeps_may_be_edited_under_shard_optimizer() -> None:
    alone = paceline.launch(edits, shards=4, threads=1)[0]
    for found in paceline.launch(edits, workers=2, shards=4, threads=1, strategy="ddp", shard_optimizer=True):
        for edit in (asked_for, *BY_ROWS):
            assert found[edit.__name__] == alone[edit.__name__], edit.__name__

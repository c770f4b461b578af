"""The state of an optimizer by name fits any optimizer over the same parameters, in whatever order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from paceline.errors import CheckpointError
from paceline.state.optimizer_state import load_optimizer_state, optimizer_state, plain
from paceline.strategies.pipeline.stage_state import StageState
from paceline.strategies.sharded import ShardedTensors


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def grouped(net: nn.Module, order: Iterable[int] = (0, 1)) -> torch.optim.AdamW:
    """Weights decay, biases do not; `order` is that of the layers."""
    layers = [net[number] for number in order]  # type: ignore[index]
    return torch.optim.AdamW(
        [
            {"params": [layer.weight for layer in layers], "weight_decay": 0.1},
            {"params": [layer.bias for layer in layers], "weight_decay": 0.0, "lr": 0.5},
        ],
        lr=0.01,
    )


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()


def test_round_trip_into_another_order_of_parameters() -> None:
    net, other = model(), model()
    optimizer, reordered = grouped(net), grouped(other, (1, 0))
    step(net, optimizer)
    saved = copy.deepcopy(plain(optimizer_state(net, optimizer)))
    assert set(saved["state"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert [group["params"] for group in saved["groups"]] == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
    other.load_state_dict(net.state_dict())
    load_optimizer_state(other, reordered, saved)
    assert [(group["lr"], group["weight_decay"]) for group in reordered.param_groups] == [
        (0.01, 0.1),
        (0.5, 0.0),
    ]
    step(net, optimizer)
    step(other, reordered)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_other_groups_are_refused() -> None:
    net = model()
    saved = optimizer_state(net, grouped(net))
    with pytest.raises(CheckpointError, match=r"groups of \[2, 2\] parameters, this one of \[4\]"):
        load_optimizer_state(net, torch.optim.AdamW(net.parameters()), saved)


def test_the_same_numbers_of_other_parameters_are_refused() -> None:
    net, other = model(), nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)})
    saved = optimizer_state(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(CheckpointError, match="parameter"):
        load_optimizer_state(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), saved)


def test_tied_weights_and_frozen_ones() -> None:
    net = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    net["b"].weight = net["a"].weight  # type: ignore[union-attr, assignment]
    net["b"].bias.requires_grad_(False)  # type: ignore[union-attr]
    names = [
        group["params"] for group in optimizer_state(net, torch.optim.SGD(net.parameters(), lr=1.0))["groups"]
    ]
    assert names == [["a.weight", "a.bias", "b.bias"]]


class Noting(nn.Linear):
    """Saves something beside its tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        del state


@pytest.mark.parametrize(
    "cut", [ShardedTensors, lambda net: StageState(net, torch.optim.SGD(net.parameters(), lr=0.1))]
)
def test_what_is_no_tensor_is_not_lost_without_a_word(cut: Callable[[nn.Module], object]) -> None:
    with pytest.raises(CheckpointError, match=r"cannot hold 1\._extra_state .* it is a dict, not a tensor"):
        cut(nn.Sequential(nn.Linear(3, 3), Noting(3, 3)))


def test_plain_keeps_what_a_checkpoint_can_hold() -> None:
    tensor = torch.ones(2)
    value = {"f": print, "n": [1, {"g": len, "t": tensor}], "b": (0.9, 0.999), "none": None}
    assert plain(value) == {"n": [1, {"t": tensor}], "b": (0.9, 0.999), "none": None}
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    fresh = LambdaLR(torch.optim.SGD(model().parameters(), lr=0.1), lambda step: 0.5**step)
    fresh.load_state_dict(plain(schedule.state_dict()))
    assert fresh.last_epoch == 1


def test_numbers_of_numpy_are_kept_and_what_cannot_be_is_named() -> None:
    from collections import Counter, deque
    from functools import partial

    import numpy as np

    state = {
        "rate": np.float32(0.5),
        "double": np.float64(0.25),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "table": np.arange(3.0),
        "nested": [{"rate": np.float64(2.0)}, (np.int32(1),)],
        "milestones": Counter({3: 1}),
        "function": lambda step: step,
        "functions": [len, partial(max, 1)],
        "kind": nn.Linear,
    }
    kept = plain(state)
    assert {name: kept[name] for name in ("rate", "double", "count", "flag", "nested", "milestones")} == {
        "rate": 0.5,
        "double": 0.25,
        "count": 3,
        "flag": True,
        "nested": [{"rate": 2.0}, (1,)],
        "milestones": Counter({3: 1}),
    }
    kinds = [type(kept[name]) for name in ("rate", "double", "count", "flag")]
    assert kinds == [np.float32, np.float64, np.int64, np.bool_]
    assert type(kept["milestones"]) is Counter
    assert isinstance(kept["table"], np.ndarray)
    assert kept["table"].tolist() == [0.0, 1.0, 2.0]
    assert {"function", "functions", "kind"}.isdisjoint(kept)
    for lost in (deque([1]), {1, 2}, object(), nn.Linear(1, 1), np.array([object()])):
        with pytest.raises(CheckpointError, match=f"cannot hold .*'window'.*{type(lost).__name__}"):
            plain({"groups": [{"window": lost}]})


def test_every_schedule_of_torch_comes_back() -> None:
    from torch.optim import lr_scheduler as schedules

    def made(kind: str) -> tuple[torch.optim.Optimizer, schedules.LRScheduler]:
        optimizer = torch.optim.SGD(model().parameters(), lr=0.1, momentum=0.9)
        steps = {
            "lambda": lambda: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            "multi": lambda: schedules.MultiStepLR(optimizer, [2, 3]),
            "cyclic": lambda: schedules.CyclicLR(optimizer, 0.01, 0.1, 2, scale_fn=lambda x: 1 / (1 + x)),
            "one": lambda: schedules.OneCycleLR(optimizer, 0.1, total_steps=9),
            "restarts": lambda: schedules.CosineAnnealingWarmRestarts(optimizer, 2),
            "chain": lambda: schedules.ChainedScheduler(
                [schedules.ConstantLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)]
            ),
            "sequence": lambda: schedules.SequentialLR(
                optimizer, [schedules.LinearLR(optimizer), schedules.StepLR(optimizer, 2)], [3]
            ),
            "swa": lambda: torch.optim.swa_utils.SWALR(optimizer, 0.01, anneal_epochs=3),
        }
        return optimizer, steps[kind]()

    for kind in ("lambda", "multi", "cyclic", "one", "restarts", "chain", "sequence", "swa"):
        (optimizer, schedule), (other, resumed) = made(kind), made(kind)
        for _ in range(3):
            optimizer.step()
            schedule.step()
        resumed.load_state_dict(copy.deepcopy(plain(schedule.state_dict())))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(4):
            for each in (optimizer, other):
                each.step()
            for one in (schedule, resumed):
                one.step()
            assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"], kind


def test_a_buffer_that_two_modules_hold_stays_one_where_it_is_moved() -> None:
    first, second = nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3, affine=False)
    second.running_mean = first.running_mean
    net = nn.Sequential(first, second, nn.Linear(3, 3, device="meta"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    StageState(net, optimizer).keep(frozenset(net.state_dict()), optimizer, torch.device("meta"))
    assert second.running_mean is first.running_mean
    assert second.running_var is not first.running_var

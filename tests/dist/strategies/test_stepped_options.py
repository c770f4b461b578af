"""Optimizers that change options in their own step (a count, a rate): servers know them, and trainers, checkpoints too."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.world import fault_points

STEPS = 8


class Counting(torch.optim.SGD):
    """Counts its steps in its group, where the count is not from the beginning, and sets its rate by it."""

    per_parameter = elementwise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["rate"] = 0.3 / group["k"]
            group["lr"] = group["lr"] * 0.9 + 0.1 * group["rate"]
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """Goes half of the way back every third step; as such wrappers do, it never calls torch's constructor."""

    per_parameter = elementwise = True

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["ahead"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self._inner.step(closure)
        for group in self._inner.param_groups:
            group["ahead"] += 1
            for one in group["params"]:
                if group["ahead"] % 3 == 0 and one.grad is not None:
                    one.mul_(0.5)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)
        self.param_groups = self._inner.param_groups


OPTIMIZERS = {
    "counting": lambda model: Counting(model.parameters(), lr=0.1),
    "lookahead": lambda model: Lookahead(torch.optim.AdamW(model.parameters(), lr=0.05)),
}


def train(
    run: paceline.Run, name: str, steps: int = STEPS, killed: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Train; a trainer is killed once where the servers have updated, and the others may not have heard of it."""

    def trap(reached: str) -> None:
        if (
            reached == fault_points.OPTIMIZER
            and run.world.rank == 1
            and run._engine.state.position.number == 4
        ):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(str(killed), os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def schedule(made: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(made, 2, 0.7)

    model, made = run.prepare(make, OPTIMIZERS[name], scheduler=schedule)
    data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(0)))
    fault_points.set_fault(trap if killed is not None else None)
    for step in run.steps(data, batch_size=8, steps=steps):
        for (x,) in step:
            step.backward(model(x).square().flatten())
        if step.number == 5:
            for group in made.param_groups:
                group["lr"] *= 1.5  # by the loop, of what the step has changed
        step.apply()
    fault_points.set_fault(None)
    options = {
        key: value for key, value in made.param_groups[0].items() if key in ("k", "rate", "lr", "ahead")
    }
    return run.weights_sha256(), options


def launch(strategy: str, workers: int, *args: Any, **options: Any) -> tuple[Any, ...]:
    launched = {"shards": 4, "threads": 1, "device": "cpu", **options}
    return paceline.launch(train, *args, strategy=strategy, workers=workers, **launched)


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_options_that_a_step_changes_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    (one,) = launch("single", 1, name)
    assert set(launch_plainly("ps", 2, name, servers=2)) == {str(one)}
    launch("ps", 2, name, 4, servers=1, out=tmp_path)
    assert launch_plainly("single", 1, name, out=tmp_path, resume=True) == (str(one),)


def launch_plainly(*args: Any, **options: Any) -> tuple[str, ...]:
    return tuple(str(result) for result in launch(*args, **options))


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_a_lost_trainer_does_not_take_them_back(name: str, tmp_path: Path) -> None:
    (one,) = launch("single", 1, name)
    found = launch_plainly("ps", 2, name, STEPS, str(tmp_path / "killed"), servers=1)
    assert (tmp_path / "killed").exists()
    assert set(found) == {str(one)}


def test_servers_that_step_apart_count_by_themselves() -> None:
    results = launch("ps", 2, "counting", servers=2, staleness=2)
    assert len({weights for weights, _ in results}) == 1

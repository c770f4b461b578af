"""A schedule, a hook that is put on late or a patched optimizer may keep a gradient: it stays what it was."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError


class Plain(paceline.Task):
    """Parameters that are copied, and one that is too large for that."""

    batch_size, shards, epochs = 16, 4, 3

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 128), nn.Linear(128, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return SGD(model.parameters(), lr=0.02)

    def train_data(self) -> TensorDataset:
        inputs = torch.randn(44, 8, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
        return paceline.Loss.mean(F.mse_loss(model(batch[0]), batch[1], reduction="none"))


class ByLastGradient(LRScheduler):
    """A rate that follows the product of the last two gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.last: list[Any] = []
        self.rate = 0.02
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        now = [one.grad for group in self.optimizer.param_groups for one in group["params"]]
        if self.last and self.last[0] is not None:
            self.rate += 1e-5 * float(sum((a * b).sum() for a, b in zip(now, self.last, strict=True)))
        self.last = now
        return [self.rate for _ in self.optimizer.param_groups]


class Scheduled(Plain):
    def scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
        return ByLastGradient(optimizer)


class HookedLate(Plain):
    def scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
        kept: deque[list[Any]] = deque(maxlen=2)

        def subtract_the_last(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            if kept:
                with torch.no_grad():
                    for one, last in zip(parameters, kept[0], strict=True):
                        one.sub_(last, alpha=0.01)
            kept.append([one.grad for one in parameters])

        def rate(step: int) -> float:
            if step == 1:
                optimizer.register_step_pre_hook(subtract_the_last)
            return 1.0

        return LambdaLR(optimizer, rate)


class Patched(Plain):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = SGD(model.parameters(), lr=0.02)
        take, kept = optimizer._init_group, []

        def init_group(group: Any, params: Any, grads: Any, buffers: Any) -> bool:
            found: bool = take(group, params, grads, buffers)
            now = list(grads)
            if kept:
                grads[:] = [one + 0.1 * last for one, last in zip(grads, kept.pop(), strict=True)]
            kept.append(now)
            return found

        optimizer._init_group = init_group  # type: ignore[method-assign]
        return optimizer


def trained(task: type[Plain], strategy: str, workers: int) -> str:
    return paceline.train(task, strategy=strategy, workers=workers, threads=1, progress=False).weights_sha256


@pytest.mark.parametrize("task", [Scheduled, HookedLate, Patched])
def test_what_keeps_a_gradient_has_the_bits_of_one_process_under_ddp(task: type[Plain]) -> None:
    alone = trained(task, "single", 1)
    assert alone != trained(Plain, "single", 1)
    assert trained(task, "ddp", 2) == alone


class ByGradient(Plain):
    """A function that looks whether there is a gradient."""

    elementwise = False

    def scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
        def rate(step: int) -> float:
            return 0.5 if step and optimizer.param_groups[0]["params"][0].grad is not None else 1.0

        if self.elementwise:
            rate.elementwise = True  # type: ignore[attr-defined]
        return LambdaLR(optimizer, rate)


class ByKeptWeight(Plain):
    """A function that has kept a weight from before it was cut."""

    def scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
        weight = optimizer.param_groups[0]["params"][0]
        return LambdaLR(optimizer, lambda step: 1 / (1 + float(torch.stack([weight]).norm())) if step else 1)


class ByGradientAsItMay(ByGradient):
    elementwise = True


class CountsAtFirst(LRScheduler):
    """A rate by the number of weights, which are whole when it is made, and by a table with a telling name."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.count = sum(one.numel() for group in optimizer.param_groups for one in group["params"])
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        options = {"params": {"grad": 4}}
        trains = [one.requires_grad for group in self.optimizer.param_groups for one in group["params"]]
        return [len(trains) / self.count / options["params"]["grad"] for _ in self.optimizer.param_groups]


class Counted(Plain):
    def scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
        return CountsAtFirst(optimizer)


@pytest.mark.parametrize(
    ("task", "strategy", "what"),
    [
        (Scheduled, "fsdp", r"'grad' of a weight in ByLastGradient\.get_lr"),
        (Scheduled, "ps", r"'grad' of a weight in ByLastGradient\.get_lr"),
        (ByGradient, "pp", r"'grad' of a weight in ByGradient\.scheduler\.<locals>\.rate"),
        (ByKeptWeight, "fsdp", r"'stack' of a weight in ByKeptWeight\.scheduler\.<locals>\.<lambda>"),
        (Counted, "tp", r"'numel' of a weight in CountsAtFirst\.__init__"),
    ],
)
def test_a_schedule_that_looks_at_weights_is_refused_where_they_are_parts(
    task: type[Plain], strategy: str, what: str
) -> None:
    with pytest.raises(InputError, match=f"the schedule looks at {what}"):
        trained(task, strategy, 2)


@pytest.mark.parametrize("task", [Counted, ByGradientAsItMay])
def test_a_schedule_that_sees_no_part_or_says_that_it_may_is_stepped(task: type[Plain]) -> None:
    assert trained(task, "fsdp", 2) == trained(task, "single", 1)

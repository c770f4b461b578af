"""A schedule, a hook that is put on late or a patched optimizer may keep a gradient: it stays what it was."""

from __future__ import annotations

from collections import deque
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError
from paceline.strategies.guards.partial_update import keeps_no_gradient


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


class KeptInEvaluation(Plain):
    """An evaluation that keeps gradients, and a loss that follows them."""

    kept: Tensor | None = None

    def eval_data(self) -> TensorDataset:
        return self.train_data()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        self.kept = model[0].weight.grad  # type: ignore[union-attr, index]
        return {"loss": paceline.Mean(model(batch[0]).pow(2).sum(), len(batch[0]))}

    def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
        made = super().loss(model, batch)
        factor = 1.0 if self.kept is None else 1 / (1 + float(self.kept.abs().sum()))
        return paceline.Loss(made.total * factor, made.weight)


def trained(task: type[Plain], strategy: str, workers: int, **options: Any) -> str:
    made = paceline.train(task, strategy=strategy, workers=workers, threads=1, progress=False, **options)
    return made.weights_sha256


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("task", [Scheduled, HookedLate, Patched, KeptInEvaluation])
def test_what_keeps_a_gradient_has_the_bits_of_one_process_under_ddp(
    task: type[Plain], transport: str
) -> None:
    alone = trained(task, "single", 1)
    assert alone != trained(Plain, "single", 1)
    assert trained(task, "ddp", 2, transport=transport) == alone


class OwnSGD(SGD):
    pass


def test_only_plain_optimizers_of_torch_keep_no_gradient() -> None:
    def made(kind: type[SGD] = SGD) -> SGD:
        return kind([torch.zeros(1, requires_grad=True)], lr=0.1)

    plain, hooked, patched = made(), made(), made()
    LambdaLR(plain, lambda _: 1.0)
    assert keeps_no_gradient(plain)
    hooked.register_step_pre_hook(lambda *_: None)
    patched.step = MethodType(lambda self, closure=None: None, patched)  # type: ignore[method-assign]
    LambdaLR(patched, lambda _: 1.0)
    assert not any(map(keeps_no_gradient, [hooked, patched, made(OwnSGD)]))


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

"""Every optimizer of torch, and schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.zoo.exhibits import exhibit
from tests.zoo.tasks.base import Small
from tests.zoo.tasks.weights import NO_SPARSE


def _optimized(name: str, made: type[Optimizer], refused_by: dict[str, str], **options: Any) -> None:
    class Optimized(Small):
        def optimizer(self, model: nn.Module) -> Optimizer:
            return made(model.parameters(), **options)

    Optimized.__name__ = Optimized.__qualname__ = name.title().replace("-", "")
    globals()[Optimized.__name__] = exhibit(
        name, f"`torch.optim.{made.__name__}`", refused_by={**NO_SPARSE, **refused_by}
    )(Optimized)


_optimized("adagrad", torch.optim.Adagrad, {}, lr=0.05)
_optimized("momentum", torch.optim.SGD, {}, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)

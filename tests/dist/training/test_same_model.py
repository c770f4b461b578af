"""Workers that make another model, or another optimizer, are refused in one line: sums of gradients go by a parameter's place."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError
from paceline.training import trainer
from paceline.training.spec import TrainSpec

OPTIONS: dict[str, Any] = {"workers": 2, "threads": 1, "device": "cpu", "shards": 4}
NAMES = ["city", "item", "user", "word"]


def elsewhere() -> bool:
    """Return whether this is another worker than the first."""
    return os.environ["RANK"] != "0"


class Parts(nn.Module):
    """Layers by name, in some order."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(4, 1) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.parts[name](x) for name in sorted(self.parts)]).sum(0)


class Fit(paceline.Task):
    """Makes what `fault` says otherwise on other workers than the first."""

    batch_size, shards, epochs = 16, 4, 1

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def model(self) -> nn.Module:
        if self.fault == "values":
            made = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            drawn = np.random.default_rng(1 + elsewhere()).random((8, 4)).astype("float32")
            with torch.no_grad():
                made[0].weight += torch.from_numpy(drawn)  # type: ignore[operator]
            return made
        if self.fault == "shape":
            width = 8 + elsewhere()
            return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        if self.fault == "count":
            return Parts(NAMES[: 3 + elsewhere()])
        return Parts(sorted(NAMES, reverse=self.fault == "order" and elsewhere()))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        if elsewhere() and self.fault == "unordered":
            parameters.reverse()
        if self.fault == "groups":
            some = parameters[2 * elsewhere() :][:2]
            others = [one for one in parameters if all(one is not other for other in some)]
            return torch.optim.SGD([{"params": some, "lr": 0.2}, {"params": others}], lr=0.01)
        if self.fault == "noted":
            groups = [{"params": parameters, "started": time.time(), "rank": os.environ["RANK"]}]
            return torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        rate = 0.02 if self.fault == "rate" and elsewhere() else 0.01
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9)

    def train_data(self) -> Any:
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
        return paceline.Loss.mean((model(batch[0]) - batch[1]).square().flatten())


def train(fault: str, **options: Any) -> Any:
    """Train with it."""
    spec = TrainSpec(task=f"{__name__}:Fit", name="fit", settings={"fault": fault})
    return paceline.launch(trainer.main, spec, **OPTIONS | options)


ORDER = (
    r"other names, on rank . than on rank .: number 0 is parts\.\w+\.weight here and parts\.\w+\.weight there"
)


@pytest.mark.parametrize(
    ("strategy", "fault", "said"),
    [
        ("ddp", "order", ORDER),
        ("fsdp", "order", ORDER),
        ("ps", "order", ORDER),
        ("local-sgd", "order", ORDER),
        (
            "ddp",
            "shape",
            r"0\.weight is a parameter of \(\d, 4\), float32 here and a parameter of \(\d, 4\), float32 there",
        ),
        (
            "fsdp",
            "count",
            r"the model has . parameters and buffers on rank .*: parts\.word\.weight is on rank 1 alone",
        ),
        (
            "ddp",
            "groups",
            r"group 0 of the optimizer holds other parameters on rank . than on rank .: parts\.city\.bias",
        ),
        ("fsdp", "rate", r"lr of the optimizer's group 0 is 0\.0. on rank . and 0\.0. on rank"),
        ("fsdp", "values", r"0\.weight begins with other values on rank 1 than on rank 0"),
        ("pp", "values", r"0\.weight begins with other values on rank 1 than on rank 0"),
    ],
)
def test_models_that_differ_by_worker_are_refused(strategy: str, fault: str, said: str) -> None:
    more = {"servers": 1} if strategy == "ps" else {}
    with pytest.raises(InputError, match=said):
        train(fault, strategy=strategy, **more)


def test_the_order_inside_a_group_of_the_optimizer_changes_nothing() -> None:
    (alone,) = train("", workers=1)
    for zero in (False, True):
        for found in train("unordered", strategy="ddp", shard_optimizer=zero):
            assert found["weights_sha256"] == alone["weights_sha256"]


def test_what_the_optimizer_does_not_read_may_differ() -> None:
    (alone,) = train("", workers=1)
    for found in train("noted", strategy="ddp"):
        assert found["weights_sha256"] == alone["weights_sha256"]


def given(run: paceline.Run, fault: str) -> None:
    """Prepare a model and an optimizer that are made already."""
    task = Fit(fault)
    model = task.model()
    run.prepare(model, task.optimizer(model))


@pytest.mark.parametrize(
    ("strategy", "fault", "said"), [("ddp", "order", ORDER), ("fsdp", "groups", "group 0 of the optimizer")]
)
def test_so_are_those_that_a_loop_has_made(strategy: str, fault: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        paceline.launch(given, fault, strategy=strategy, **OPTIONS)

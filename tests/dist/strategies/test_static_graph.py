"""ddp takes a graph for static until it is not: sums leave in the order in which gradients come, and a change is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import InputError, Loss, Run, launch
from paceline.checkpoint import weights_sha256
from paceline.strategies.data_parallel.ddp_reducer import DdpReducer

ORDER = (3, 0, 5, 1, 4, 2)


class Crossed(nn.Module):
    """Layers that are used in another order than they were made, and after some passes not all of them."""

    def __init__(self, passes: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in ORDER)
        self._passes, self._done = passes, 0

    def forward(self, values: Tensor) -> Tensor:
        self._done += 1
        shortened = self._passes is not None and self._done > self._passes
        for layer in ORDER[:-1] if shortened else ORDER:
            values = self.layers[layer](values)
        return values


def train(run: Run, passes: int | None) -> tuple[list[list[str]], str]:
    """Train three steps; gives the layers in the order in which their sums left, step by step, and the weights."""
    names: dict[int, str] = {}
    left: list[list[str]] = []
    reduce = DdpReducer.reduce

    def noted(reducer: Any, bucket):  # type: ignore[no-untyped-def]  (torch looks at its name and at its type)
        left[-1].extend(names[id(one)] for one in bucket.parameters() if id(one) in names)
        return reduce(reducer, bucket)

    DdpReducer.reduce = noted  # type: ignore[method-assign]
    replica: Any = run._engine.preparation.prepare_replica(
        lambda: Crossed(passes), lambda model: torch.optim.SGD(model.parameters(), lr=0.01)
    )
    names |= {id(value): name for name, value in replica.model.named_parameters()}
    data = TensorDataset(torch.randn(24, 300, generator=torch.Generator().manual_seed(1)))
    for step in run.steps(data, batch_size=8, steps=3):
        left.append([])
        step.compute(lambda model, batch: Loss.mean(model(batch[0]).square().mean(1)))
    return left, weights_sha256(replica.state()["model"])


def test_sums_leave_in_the_order_of_the_gradients_from_the_second_step_on() -> None:
    options: dict[str, Any] = {"shards": 2, "threads": 1, "device": "cpu"}
    ((_, alone),) = launch(train, None, strategy="single", **options)
    arrival = [f"layers.{layer}.{kind}" for layer in reversed(ORDER) for kind in ("bias", "weight")]
    for left, weights in launch(train, None, strategy="ddp", workers=2, bucket_mb=0.7, **options):
        assert left[0] != arrival
        assert left[1:] == [arrival, arrival]
        assert weights == alone


def test_a_graph_that_changes_later_is_named() -> None:
    with pytest.raises(
        InputError, match=r"no gradient for layers\.2\.weight, layers\.2\.bias.*find_unused_parameters"
    ):
        launch(train, 2, strategy="ddp", workers=2, shards=2, threads=1, device="cpu")

"""One worker that computes a global batch in one pass: where no bits are promised its gradients need no correction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss

FEATURES = torch.randn(21, 6, generator=torch.Generator().manual_seed(1))
BATCH = 7


def weighted(model: nn.Module, batch: list[Tensor]) -> Loss:
    weights = batch[0][:, 0].abs() + 0.1
    return Loss((model(batch[0]).square().sum(1) * weights).sum(), weights.sum())


def with_a_term(model: nn.Module, batch: list[Tensor]) -> Loss:
    loss = weighted(model, batch)
    return Loss(loss.total, loss.weight, {"size": Loss(model(batch[0]).abs().sum(), len(batch[0]))})


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(run: paceline.Run, loss: Any) -> tuple[list[Any], str]:
    """Return what the gradients were multiplied by in the end and the weight of each step, and the weights."""
    run.prepare(*made())
    data = TensorDataset(FEATURES)
    results = [step.compute(loss) for step in run.steps(data, batch_size=BATCH, epochs=1)]
    return [(one.applied_factor, one.weight) for one in results], run.weights_sha256()


def by_hand(run: paceline.Run) -> tuple[list[float], str]:
    """Return the weight of each of the same steps without paceline's own, and the weights."""
    (model, optimizer), seen = made(), []
    for data in run.loader(TensorDataset(FEATURES), batch_size=BATCH).epoch(0):
        loss = weighted(model, data.shards[0].batches[0])
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
        seen.append(float(loss.weight))
    run.prepare(model, optimizer)
    return seen, run.weights_sha256()


def launched(function: Any, *arguments: Any, **options: Any) -> Any:
    return paceline.launch(function, *arguments, threads=1, device="cpu", **options)[0]


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_the_only_pass_of_a_step_divides_by_the_true_weight(strategy: str) -> None:
    steps, weights = launched(trained, weighted, strategy=strategy, workers=1, exact="numeric")
    assert [factor for factor, _ in steps] == [1.0] * 3
    assert ([weight for _, weight in steps], weights) == launched(by_hand, strategy="single")


@pytest.mark.parametrize(
    "options", [{"shards": 2}, {"exact": "bitwise"}, {"micro_batch": 3}, {"loss": with_a_term}]
)
def test_all_others_are_corrected_behind_their_passes(options: dict[str, Any]) -> None:
    options = {"exact": "numeric", **options}
    loss = options.pop("loss", weighted)
    steps, _ = launched(trained, loss, strategy="single", **options)
    corrected = [1.0 if loss is with_a_term else BATCH / weight for _, weight in steps]
    assert [factor for factor, _ in steps] == pytest.approx(corrected)
    assert len({factor for factor, _ in steps}) == (1 if loss is with_a_term else 3)

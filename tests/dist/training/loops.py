"""Training loops as a user writes them on `Run`, good ones and bad ones; workers import them from here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline import Loss
from tests.contract.tasks import Classify

Weights = dict[str, Tensor]


def weights(model: nn.Module) -> Weights:
    """Copy them out of the worker."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def prepare(run: paceline.Run, task: Classify) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make what the loops below train; a Run has seeded torch already."""
    model = task.model()
    return run.prepare(model, task.optimizer(model))


def design(run: paceline.Run, max_grad_norm: float | None, steps: int) -> tuple[Weights, float, int]:
    """The loop of the design, word for word."""
    task = Classify()
    model, _ = prepare(run, task)
    result = None
    for step in run.steps(task.train_data(), batch_size=8, steps=steps):
        for features, labels in step:
            losses = F.cross_entropy(model(features), labels, reduction="none")
            step.backward(losses.sum(), len(losses))
        result = step.apply(max_grad_norm=max_grad_norm)
    assert result is not None
    return weights(model), result.loss, run._engine.state.position.number


def measure(run: paceline.Run) -> dict[str, float]:
    """Evaluate a data set without a Task."""
    task = Classify()
    prepare(run, task)
    return run.evaluate(task.eval_data(), task.metrics, batch_size=8)


def skip(run: paceline.Run, left_out: int) -> tuple[Weights, float]:
    """Leave out the batches that hold a given sample number; data is its own number."""
    model = nn.Linear(1, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    numbers = torch.arange(16.0).unsqueeze(1)
    data = torch.utils.data.TensorDataset(numbers / 16, numbers)
    total = 0.0
    for step in run.steps(data, batch_size=16, steps=3):
        for features, number in step:
            if left_out in number:
                continue
            step.backward(Loss.mean((model(features) - number).square()))
        total += step.apply().weight
    return weights(model), total


def forget(run: paceline.Run, what: str) -> Any:
    """Get a loop wrong in one way."""
    task = Classify()
    model, _ = prepare(run, task)
    for step in run.steps(task.train_data(), batch_size=8, steps=3):
        if what == "batches" and step.number == 1:
            step.apply()
            continue
        for features, labels in step:
            losses = F.cross_entropy(model(features), labels, reduction="none")
            if what == "weight":
                step.backward(losses.sum())
            elif what == "sum":
                step.backward(losses, len(losses))
            elif what == "loss":
                step.backward(Loss.mean(losses).total.item(), 1)  # type: ignore[arg-type]
            elif what != "backward":
                step.backward(losses.sum(), len(losses))
            if what == "rest":
                break
        if what != "apply":
            step.apply()
        if what == "once":
            step.apply()
    return weights(model)


def unprepared(run: paceline.Run) -> None:
    """Start without a model."""
    for _ in run.steps(Classify().train_data(), batch_size=8, steps=1):
        pass


def measure_wrongly(run: paceline.Run) -> None:
    """Give plain numbers as metrics."""
    task = Classify()
    prepare(run, task)
    run.evaluate(task.eval_data(), lambda model, batch: {"size": len(batch)}, batch_size=8)  # type: ignore[dict-item]


def alone(run: paceline.Run, what: str) -> None:
    """Ask on rank 0 only for what takes all workers, behind step 1."""
    task = Classify()
    model, _ = prepare(run, task)
    for step in run.steps(task.train_data(), batch_size=8, steps=4):
        for features, labels in step:
            losses = F.cross_entropy(model(features), labels, reduction="none")
            step.backward(losses.sum(), len(losses))
        step.apply()
        if step.number == 1 and run.world.is_first:
            asked: dict[str, Callable[[], object]] = {
                "hash": run.weights_sha256,
                "save": run.save,
                "evaluation": lambda: run.evaluate(task.eval_data(), task.metrics, batch_size=8),
            }
            print(asked[what]())


def listed(run: paceline.Run) -> None:
    """Give a list of ready batches."""
    task = Classify()
    model, _ = prepare(run, task)
    data = task.train_data()
    batches = [data[first : first + 8] for first in range(0, 56, 8)]
    for step in run.steps(batches, batch_size=2, steps=1):
        for features, labels in step:
            losses = F.cross_entropy(model(features).flatten(0, 1), labels.flatten(), reduction="none")
            step.backward(losses.sum(), len(losses))
        step.apply()

"""A loop from a textbook: what a run of one shard must agree with. Only the batches and their seeds are paceline's."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import paceline
from paceline.checkpoint import weights_sha256
from paceline.data import ShardedLoader
from paceline.data.step_data import StepData
from paceline.task import as_float
from paceline.training.reference import load_task
from paceline.world import seeds

if TYPE_CHECKING:
    from tests.zoo.working import Job


def train_plainly(run: paceline.Run, job: Job) -> dict[str, Any]:
    """Train a task without paceline."""
    task = load_task(job.task, {})
    seeds.seed_everything(seeds.derive(task.seed, "model"))
    model = task.model()
    optimizer = task.optimizer(model)
    loader = _feed(task, task.train_data(), shuffle=True)
    per_epoch = loader.steps_per_epoch
    scheduler = task.scheduler(optimizer, job.steps if per_epoch is None else task.epochs * per_epoch)
    number, epoch = 0, 0
    while number < job.steps:
        for data in loader.epoch(epoch):
            _step(task, model, optimizer, data, number)
            if scheduler is not None:
                scheduler.step()
            number += 1
            task.steps_done = number
            if number == job.steps:
                break
        else:
            _measured(task, model)
        epoch += 1
    loader.close()
    metrics = _measured(task, model)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {"model": state, "weights": weights_sha256(state), "steps": number, "metrics": metrics}


def _measured(task: paceline.Task, model: nn.Module) -> dict[str, float]:
    """Measure the held-out samples, batch by batch."""
    loader = _feed(task, task.eval_data(), shuffle=False)
    sums: dict[str, tuple[float, float]] = {}
    model.eval()
    with torch.no_grad(), _autocast(task):
        for batch in (batch for data in loader.epoch(0) for batch in data.shards[0].batches):
            for name, mean in task.metrics(model, batch).items():
                total, weight = sums.get(name, (0.0, 0.0))
                sums[name] = total + as_float(mean.total), weight + as_float(mean.weight)
    model.train()
    loader.close()
    return {name: total / weight for name, (total, weight) in sums.items()}


def _feed(task: paceline.Task, data: Any, *, shuffle: bool) -> ShardedLoader:
    return ShardedLoader(
        data,
        batch_size=task.batch_size,
        shards=1,
        seed=task.seed,
        owned=range(1),
        shuffle=shuffle,
        micro_batch=task.micro_batch,
        collate=task.collate,
    )


def _autocast(task: paceline.Task) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if task.precision == "bf16" else contextlib.nullcontext()


def _step(task: paceline.Task, model: nn.Module, optimizer: Optimizer, data: StepData, number: int) -> None:
    """Take one step over the whole batch: the gradient of a sum, divided by its weight."""
    optimizer.zero_grad()
    (shard,) = data.shards
    seeds.seed_everything(seeds.derive(task.seed, "shard", number, 0))
    weight: Any = 0
    for batch in shard.batches:
        with _autocast(task):
            loss = task.loss(model, batch)
        value: Tensor = loss.total
        if len(shard.batches) == 1:
            value = value / loss.weight
            for term in loss.auxiliary.values():
                value = value + term.total / term.weight
        value.backward()
        weight = weight + loss.weight
    if len(shard.batches) > 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight
    if task.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), task.max_grad_norm)
    optimizer.step()

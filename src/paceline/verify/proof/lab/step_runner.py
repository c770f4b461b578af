"""One shard, computed as often as wanted from exactly the same beginning."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from paceline.compat.autograd import run_backward
from paceline.data import to_device
from paceline.strategies.base import ShardWork
from paceline.strategies.guards.loss_checks import check_loss
from paceline.strategies.precision import Precision
from paceline.strategies.replica import Replica
from paceline.strategies.schedule import evaluating
from paceline.task import as_float
from paceline.verify.proof import digests
from paceline.verify.proof.lab.notes import ShardAttempt
from paceline.verify.proof.record import Digests
from paceline.verify.proof.recording import rates
from paceline.verify.proof.task_harness import TaskHarness
from paceline.verify.proof.tracing import forward_hooks
from paceline.world import seeds

Gradients = dict[str, Tensor]


class StepRunner:
    """A replica held still: no attempt leaves a trace on weights, buffers or batches."""

    def __init__(self, harness: TaskHarness, replica: Replica, size: int) -> None:
        self._task, self._size = harness.task, size
        self.model, self._optimizer = replica.model, replica.optimizer
        self._device = harness.run.world.device
        self._precision = Precision(harness.options.precision, self._device)
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def attempt(self, shard: ShardWork, scale: float = 1.0) -> tuple[ShardAttempt, Gradients]:
        """Compute a shard; `scale` is what the backward pass starts from."""
        self._restore()
        seeds.seed_everything(shard.seed)
        before, hidden = rates(self._optimizer), _attributes(self.model)
        totals, weights, modules = [], [], []
        with forward_hooks(
            self.model, leave=lambda name, output: modules.append((name, digests.of_batch(output)))
        ):
            for batch in self._copied(shard):
                with self._precision.autocast():
                    value = self._task.loss(self.model, batch)
                check_loss(value)
                totals.append(float(value.total.detach()).hex())
                weights.append(as_float(value.weight))
                root = value.total + sum(term.total for term in value.auxiliary.values())
                run_backward((root,), (torch.full_like(root, scale / self._size),))
        after = rates(self._optimizer)
        held = {
            name: None if parameter.grad is None else parameter.grad.to_dense()
            for name, parameter in self.trainable()
        }
        moved = next(((old, new) for old, new in zip(before, after, strict=True) if old != new), None)
        found: Gradients = {name: gradient for name, gradient in held.items() if gradient is not None}
        attempt = ShardAttempt(
            totals=tuple(totals),
            weights=tuple(weights),
            modules=tuple(modules),
            gradients=digests.of_named(found.items()),
            unused=tuple(name for name, gradient in held.items() if gradient is None),
            buffers=self._changed_buffers(),
            hidden=tuple(
                name for name, value in _attributes(self.model).items() if hidden.get(name) != value
            ),
            seed_left=torch.cuda.initial_seed() if self._device.type == "cuda" else torch.initial_seed(),
            rates_moved=moved,
        )
        self._restore()
        return attempt, found

    def touched(self, shard: ShardWork) -> tuple[str, ...]:
        """Name the parameters whose `.grad` the loss function changes before any backward pass."""
        self._restore()
        for _, parameter in self.trainable():
            parameter.grad = torch.full_like(parameter, 1024.0)
        seeds.seed_everything(shard.seed)
        with self._precision.autocast():
            self._task.loss(self.model, self._copied(shard)[0])
        found = tuple(
            name
            for name, parameter in self.trainable()
            if parameter.grad is None or not bool((parameter.grad == 1024.0).all())
        )
        self._restore()
        return found

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that are trained, by name."""
        return [pair for pair in self.model.named_parameters() if pair[1].requires_grad]

    def measure(self, batch: Any) -> tuple[float, float]:
        """Return total and weight of a batch, without dropout and batch statistics; a model that still draws is refused."""
        with evaluating(self.model), self._precision.autocast():
            before = torch.get_rng_state()
            value = self._task.loss(self.model, to_device(batch, self._device))
            if not torch.equal(before, torch.get_rng_state()):
                raise ValueError("the model draws random numbers in evaluation mode too")
        return float(value.total), as_float(value.weight)

    def _copied(self, shard: ShardWork) -> list[Any]:
        return [to_device(copy.deepcopy(batch), self._device) for batch in shard.batches]

    def _restore(self) -> None:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
        for parameter in self.model.parameters():
            parameter.grad = None

    def _changed_buffers(self) -> Digests:
        return {
            name: digests.of_tensor(buffer)
            for name, buffer in self.model.named_buffers()
            if digests.of_tensor(buffer) != digests.of_tensor(self._buffers[name])
        }


def _attributes(model: nn.Module) -> dict[str, str]:
    """Digest the numbers and tensors that modules keep as plain attributes."""
    return {
        f"{name}.{key}" if name else key: digests.of_batch(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_") and isinstance(value, (Tensor, bool, int, float))
    }

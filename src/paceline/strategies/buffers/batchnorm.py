"""Batch normalisation over the whole global batch, on any device: `--sync-batchnorm`.

Each worker adds up its own sums, a small all-reduce makes the mean the global batch's, another one the variance, and
the same happens to their gradients on the way back. (torch's SyncBatchNorm does that on GPUs only.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.compat.modules import BatchNorm, children_of
from paceline.errors import InputError
from paceline.world import Comm


class _Sum(torch.autograd.Function):
    """A sum over all workers, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(context: Any, comm: Comm, value: Tensor) -> Tensor:
        context.comm = comm
        total: Tensor = comm.all_reduce(value)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, context.comm.all_reduce(gradient.contiguous())


class GlobalBatchNorm(nn.Module):
    """A BatchNorm layer whose statistics in training are those of all workers' samples together."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, layer: BatchNorm, comm: Comm) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(layer, name))
        self._eps, self._momentum, self._comm = layer.eps, layer.momentum, comm

    def forward(self, values: Tensor) -> Tensor:
        """Normalise each channel (dimension 1)."""
        if not self.training:
            return F.batch_norm(
                values,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=False,
                eps=self._eps,
            )
        others = [axis for axis in range(values.dim()) if axis != 1]
        wide = values if values.dtype == torch.float64 else values.float()
        count = values.new_full((1,), values.numel() / values.shape[1], dtype=wide.dtype)
        channels = values.shape[1]
        shape = [1, -1] + [1] * (values.dim() - 2)
        first = self._sum(torch.cat([wide.sum(others), count]))
        count, mean = first[-1], first[:channels] / first[-1]
        # About the mean, not E[x^2] - E[x]^2: that difference of large numbers would leave nothing of a small variance.
        variance = self._sum((wide - mean.view(shape)).square().sum(others)) / count
        self._remember(mean.detach(), variance.detach(), count.detach())
        scale = (variance + self._eps).rsqrt()
        shift = -mean * scale
        if self.weight is not None:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        normal: Tensor = (wide * scale.view(shape) + shift.view(shape)).to(values.dtype)
        return normal

    def regroup(self, comm: Comm) -> None:
        """Take the statistics with another group of workers from now on."""
        self._comm = comm

    def _sum(self, value: Tensor) -> Tensor:
        total: Tensor = _Sum.apply(self._comm, value)  # type: ignore[no-untyped-call]
        return total

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics, by the rule of torch's own layer; a GPU is not asked for any number."""
        if self.running_mean is None or self.running_var is None:
            return
        share: float | Tensor = self._momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
            if self._momentum is None:
                share = self.num_batches_tracked.double().reciprocal().to(mean.dtype)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), share)


def synchronise(model: nn.Module, comm: Comm, shards: int) -> None:
    """Replace every BatchNorm layer of a model, in place; parameters and buffers keep their names and tensors."""
    if shards != comm.size:
        raise InputError(
            f"--sync-batchnorm takes one shard a worker, because a worker's shards go through the model one after the other: "
            f"there are {shards} shards for {comm.size} workers. Use --workers {shards}, or --shards {comm.size}."
        )
    # A group of its own: these sums come in mid-pass, between the reductions of gradient buckets.
    own = comm.split(0)
    if own is None:
        raise RuntimeError("a group of all workers without this one")
    made: dict[nn.Module, GlobalBatchNorm] = {}
    for parent in list(model.modules()):
        for name, child in list(children_of(parent).items()):  # a layer that has two names is one under both
            if isinstance(child, BatchNorm):
                if child not in made:
                    made[child] = GlobalBatchNorm(child, own)
                setattr(parent, name, made[child])
            elif isinstance(child, GlobalBatchNorm):
                child.regroup(own)

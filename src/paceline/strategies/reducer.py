"""Adds up the gradients of a step over the workers that samples are dealt to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.compat.autograd import run_backward
from paceline.strategies import gradients, sparse
from paceline.strategies.base import StepWork
from paceline.strategies.buffers.buffers import Buffers, gather_rows
from paceline.strategies.result import StepResult
from paceline.strategies.step_state import StepState
from paceline.task import Loss
from paceline.world import World, all_gather_object


class Reducer:
    """Adds up the gradients of one worker's shards; subclasses add up over workers, too."""

    watches = False
    """Whether passes may not write to weights, because each worker's would do so with other samples."""
    shows_sums = True
    """Whether the parameters that a loop sees ever hold the sums."""
    sent = False
    """Whether the last pass of this worker has taken its gradients along: then `.grad` holds everybody's."""
    narrows = True
    """Whether it can be wired up for a part of what trains, and switch from one part to another between steps."""

    def may_be_kept(self) -> bool:
        """Return whether somebody may keep a gradient of this step beyond it: it must not lie where the next one is written."""
        return True

    def give_up_sums(self) -> None:
        """Put sums where no step writes, before code of the user's comes by that may keep them."""

    @property
    def capturable(self) -> bool:
        """Whether a step with it may be captured as a CUDA graph: it talks to no other worker."""
        return type(self) is Reducer and self.world.size == 1

    def __init__(self, world: World, *, divides_early: bool = False) -> None:
        """`world` holds the workers that samples are dealt to.

        Where it `divides_early`, a step of a single pass starts that pass from one over its true weight: the gradients need
        no correction, which reads and writes all of them. The weight is rounded otherwise then: only where no bits are promised.
        """
        self.world = world
        self._divides_early, self._divided = divides_early, False

    def wire(self, step: StepState) -> None:
        """Take hold of what trains now: once before the first step, and when that has changed."""
        self.step = step

    def switch(self, step: StepState) -> None:
        """Go on with what trains in another turn, wired up before or for the first time."""
        self.step = step

    def begin(self, work: StepWork) -> None:
        """Start a step; its state has begun."""

    def backward(self, loss: Loss) -> None:
        """Add one batch's gradients; the last one of the step may take them along to other workers."""
        step = self.step
        if loss.auxiliary:
            step.auxiliary.backward(loss.auxiliary, step.start, step.work.size)
        self._divided = self._divides_early and step.is_whole(loss)
        run_backward((loss.total, step.loss_stats), step.starts(loss, divided=self._divided))

    def close_shard(self, index: int) -> None:
        """Put a finished shard's gradients into the tree."""
        self.step.tree.add((index, index + 1), self.step.take())

    def end_batches(self) -> None:
        """Called behind the last batch of this worker."""

    def finish(self) -> None:
        """Make `.grad` hold the sum over the whole global batch."""
        step = self.step
        if step.tree.nodes:
            step.give(step.tree.nodes[0][1])
        for parameter in step.sparse:
            if parameter.grad is not None:
                parameter.grad = sparse.coalesced(parameter.grad)

    def result(self) -> StepResult | None:
        """Return what the step came to; None where no worker called backward."""
        step = self.step
        entry = step.loss_stats.grad
        if entry is None:
            return None
        terms = step.auxiliary.entries() if step.auxiliary.names else {}
        return StepResult(step.work.number, step.work.size, entry, terms, divided=self._divided)

    def factor(self, result: StepResult) -> Tensor | float:
        """Return what the gradients, which are over the number of samples, are to be multiplied by."""
        return result.factor

    def norm(self, held: Sequence[Tensor | None], *, wanted: bool) -> Tensor | None:
        """Return the norm of the whole gradient where it is `wanted`; `held` is this worker's."""
        return norm_of(held) if wanted else None

    def unscale(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Undo the scale of fp16 gradients."""
        scaler.unscale_(optimizer)

    def combine_buffers(self, buffers: Buffers) -> None:
        """Make one value of what all shards made of each buffer."""
        world, shards = self.world, self.step.shards
        if world.size == 1:
            buffers.combine(lambda names: names, lambda rows: rows)
        else:
            buffers.combine(
                lambda names: agreed_names(world, names, buffers),
                lambda rows: gather_rows(rows, buffers.like(), world, shards),
            )

    def refused(self, result: StepResult) -> None:
        """Called where the step is rejected, on all workers alike: its loss or its norm is no number."""

    def abandon(self) -> None:
        """Release the group: it is broken."""


class AroundReducer(Reducer):
    """A reducer around another one, which does all that a subclass does not write anew."""

    def __init__(self, inner: Reducer) -> None:
        super().__init__(inner.world)
        self.inner = inner
        self.watches, self.shows_sums = inner.watches, inner.shows_sums

    def wire(self, step: StepState) -> None:
        """Take hold of what trains now."""
        super().wire(step)
        self.inner.wire(step)

    def begin(self, work: StepWork) -> None:
        """Start a step."""
        self.inner.begin(work)
        self.sent = False

    def backward(self, loss: Loss) -> None:
        """Add one batch's gradients."""
        self.inner.backward(loss)
        self.sent = self.inner.sent

    def close_shard(self, index: int) -> None:
        """Keep a finished shard's gradients."""
        self.inner.close_shard(index)

    def end_batches(self) -> None:
        """End the batches of this worker."""
        self.inner.end_batches()

    def finish(self) -> None:
        """Make `.grad` hold the sums."""
        self.inner.finish()

    def result(self) -> StepResult | None:
        """Return what the step came to."""
        return self.inner.result()

    def factor(self, result: StepResult) -> Tensor | float:
        """Return what the gradients are to be multiplied by."""
        return self.inner.factor(result)

    def norm(self, held: Sequence[Tensor | None], *, wanted: bool) -> Tensor | None:
        """Return the norm of the whole gradient."""
        return self.inner.norm(held, wanted=wanted)

    def unscale(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Undo the scale of fp16 gradients."""
        self.inner.unscale(scaler, optimizer)

    def combine_buffers(self, buffers: Buffers) -> None:
        """Make one value of what all shards made of each buffer."""
        self.inner.combine_buffers(buffers)

    def refused(self, result: StepResult) -> None:
        """Called where the step is rejected."""
        self.inner.refused(result)

    def abandon(self) -> None:
        """Release the group."""
        self.inner.abandon()


def norm_of(held: Sequence[Tensor | None]) -> Tensor | None:
    """Return the norm of some gradients, of which some may be rows."""
    measured = [sparse.norms(one) if one.is_sparse else one for one in held if one is not None]
    return gradients.total_norm(measured) if measured else None


def agreed_names(world: World, names: list[str], buffers: Buffers) -> list[str]:
    """Return the buffers that change on any worker, in the model's order."""
    every = {name for part in all_gather_object(world.comm, names) for name in part}
    return [name for name, _ in buffers.model.named_buffers() if name in every]


def agree_on_terms(world: World, step: StepState) -> None:
    """Exchange the names of the auxiliary terms once, in the first step: a worker without samples has seen none."""
    auxiliary = step.auxiliary
    if not auxiliary.agreed:
        auxiliary.names = max(all_gather_object(world.comm, auxiliary.names), key=len)
        auxiliary.agreed = True

"""The gradient of a worker's own shards, and the exact loss of everybody's."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.reduce.post_backward import PostBackwardReduce
from paceline.reduce.tree import add
from paceline.strategies.base import StepWork, StrategyInputs
from paceline.strategies.buffers.buffers import Buffers
from paceline.strategies.local_sgd.placement import DriftingPlacement
from paceline.strategies.reducer import Reducer, agree_on_terms, agreed_names, norm_of
from paceline.strategies.result import StepResult, check_norm
from paceline.world import World


class OwnReducer(Reducer):
    """This worker's own sums; everybody's in the first steps, which are taken together."""

    watches = True

    def __init__(self, inputs: StrategyInputs, world: World, placement: DriftingPlacement) -> None:
        super().__init__(world)
        self._placement = placement
        self._sums = (
            PostBackwardReduce(world, inputs.shards, inputs.transport, strategy="local-sgd")
            if inputs.tuning.local_warmup
            else None
        )
        self._own: Tensor | None = None
        """This worker's own loss and weight of the step in flight."""

    @property
    def _together(self) -> bool:
        return self._placement.is_together(self.step.work.number)

    def begin(self, work: StepWork) -> None:  # noqa: ARG002
        """Start a step; the first one of a period notes where the buffers stand."""
        if not self._together:
            self._placement.open_period()

    def finish(self) -> None:
        """Put into `.grad` this worker's own sum, or the sum over all workers in a step that averages."""
        step = self.step
        agree_on_terms(self.world, step)
        if self._together and self._sums is not None:
            behind = [*step.parameters, step.loss_stats] * len(step.auxiliary.names)
            like = [one.detach() for one in [*step.tracked, *behind]]
            step.give(self._sums.sum(step.tree, like))
            self._own = None
        else:
            step.give(functools.reduce(add, (held for _, held in step.tree.nodes)))
            self._own = step.loss_stats.grad
        self._placement.has_learned = self._own is not None
        if step.loss_stats.grad is None:
            step.loss_stats.grad = torch.zeros_like(step.loss_stats)

    def result(self) -> StepResult | None:
        """Return the exact loss of the global batch: a few numbers from everybody."""
        result = super().result()
        if self._together or result is None:
            return result
        # A worker without a sample knows the names of the terms, but has no entry for them.
        names, empty = self.step.auxiliary.names, torch.zeros_like(result.entry)
        stats = torch.stack([result.entry, *(result.terms.get(name, empty) for name in names)])
        entry, *terms = self._placement.averaging.sum_small(stats)
        self._placement.total += entry[1]
        if self._own is not None:
            self._placement.learned += self._own[1]
        return StepResult(result.number, result.size, entry, dict(zip(names, terms, strict=True)))

    def factor(self, result: StepResult) -> Tensor | float:
        """Divide by this worker's own weight."""
        if self._together:
            return result.factor
        if self._own is None:
            return 1.0
        weight = self._own[1]
        return torch.where(weight > 0, self.step.work.size / weight, 0.0)

    def norm(self, held: Sequence[Tensor | None], *, wanted: bool) -> Tensor | None:
        """Return this worker's own; raise on all where anybody's is no number: whoever went on alone would wait for ever."""
        if not wanted:
            return None
        norm = norm_of(held)
        if not self._together and self.world.device.type == "cpu":
            bad = torch.tensor([0 if norm is None or math.isfinite(norm) else 1])
            if self.world.comm.all_reduce(bad).any():
                check_norm(self.step.work.number, math.nan)
        return norm

    def combine_buffers(self, buffers: Buffers) -> None:
        """Make one value of what this worker's shards made of each buffer; everybody's where the step is taken together."""
        if self._together:
            super().combine_buffers(buffers)
        else:
            buffers.combine(lambda names: agreed_names(self.world, names, buffers), lambda rows: rows)

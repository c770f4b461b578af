"""Adds up the gradients and losses of one worker's stages over micro-batches, shards and pipelines.

A list of gradients holds those of all parameters of this worker, then the loss statistics (sum of losses, weight), then for each
auxiliary term the same again. Only the worker of the last stage knows losses; it sends them to the others once per step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import InputError
from paceline.reduce.norms import placed_norms, total_norm
from paceline.reduce.post_backward import PostBackwardReduce
from paceline.reduce.tree import Gradients
from paceline.strategies.auxiliary import check_terms
from paceline.strategies.base import StepWork, StrategyInputs
from paceline.strategies.buffers.buffers import Buffers
from paceline.strategies.gradients import loss_entry
from paceline.strategies.guards.loss_checks import check_loss
from paceline.strategies.memory.recompute import check_passes
from paceline.strategies.pipeline.placement import StagePlacement
from paceline.strategies.pipeline.stage import Micro, Stage
from paceline.strategies.reducer import Reducer, agree_on_terms
from paceline.strategies.step_state import StepState
from paceline.task import Loss
from paceline.world import World
from paceline.world.fault_points import REDUCTION, hit


class StageReducer(Reducer):
    """The gradients of this worker's stages; passes bring them in micro-batch by micro-batch."""

    watches = True

    def __init__(self, inputs: StrategyInputs, world: World, placement: StagePlacement) -> None:
        super().__init__(placement.data)
        self._everybody, self._placement = world, placement
        self._post_backward = PostBackwardReduce(placement.data, inputs.shards, inputs.transport)

    def wire(self, step: StepState) -> None:
        """Take hold of what this worker's stages train."""
        super().wire(step)
        # In one pipeline a stage goes through the shards as one process does, and torch finds what a pass back still needs.
        step.counts_writes = self.world.size > 1
        self._stride = len(step.tracked)
        order = {name: place for place, name in enumerate(self._placement.trained)}
        self._places: list[int] = []
        """Where this worker's parameters are in the order of the whole model."""
        self._offsets: dict[int, int] = {}
        """Where those of each stage begin among them."""
        for stage in self._placement.stages.values():
            self._offsets[stage.index] = len(self._places)
            self._places += [order[name] for name in stage.trained]

    def begin(self, work: StepWork) -> None:
        """Start a step with nothing."""
        stages = len(self._placement.stages)
        self._order = [shard.index for shard in work.shards]
        self._open = {shard.index: len(shard.batches) * stages for shard in work.shards}
        """How many passes back are still to come of each shard."""
        self._made: dict[int, Gradients] = {}
        self._add_finished()

    # What a pass brings in.

    def add_loss(self, micro: Micro, loss: Loss) -> None:
        """Add a loss to the statistics; called on the last stage only."""
        check_loss(loss)
        if not loss.total.requires_grad:
            raise InputError(
                "the loss depends on nothing that is trained here. Leave out .detach() and no_grad(); or a stage begins inside "
                "torch.no_grad() or checkpoint(use_reentrant=True), where pp cannot follow: name other cuts in "
                "pipeline_stages(), or use use_reentrant=False."
            )
        step, names = self.step, sorted(loss.auxiliary)
        if not step.auxiliary.agreed:
            self.terms = self.terms or names
        check_terms(names, self.terms)
        if names:
            check_passes(step.recompute)
        for term, part in enumerate([loss, *(loss.auxiliary[name] for name in names)]):
            step.totals.append((micro.shard, part.total.detach()))
            self._add(
                micro.shard,
                self._stride * (term + 1) - 1,
                [loss_entry(part, step.work.size, step.loss_stats.dtype)],
            )

    def add_gradients(self, micro: Micro, stage: Stage, made: Sequence[Gradients]) -> None:
        """Add one micro-batch's gradients of a stage's parameters, one list for each term, the auxiliary terms first."""
        for term, row in enumerate((made[-1], *made[:-1])):
            self._add(micro.shard, term * self._stride + self._offsets[stage.index], row)
        self._open[micro.shard] -= 1
        self._add_finished()

    @property
    def terms(self) -> list[str]:
        """The auxiliary terms of the loss, in order; empty until a loss with some was seen."""
        return self.step.auxiliary.names

    @terms.setter
    def terms(self, names: list[str]) -> None:
        self.step.auxiliary.names = names

    def _add(self, shard: int, start: int, row: Gradients) -> None:
        held = self._made.setdefault(shard, [])
        held += [None] * (start + len(row) - len(held))
        for place, one in enumerate(row, start):
            old = held[place]
            if one is not None:
                held[place] = one if old is None else old.add_(one)

    def _add_finished(self) -> None:
        """Put finished shards into the tree, from left to right."""
        while self._order and self._open[self._order[0]] == 0:
            shard = self._order.pop(0)
            self.step.tree.add((shard, shard + 1), self._made.pop(shard, []))

    # The sums.

    def finish(self) -> None:
        """Make `.grad` hold the sum over the whole global batch."""
        step, stride = self.step, self._stride
        agree_on_terms(self._everybody, step)
        like = [one.detach() for one in step.tracked]
        total = self._post_backward.sum(step.tree, like * (1 + len(self.terms)))
        nothing = torch.zeros_like(like[-1])
        mine = torch.stack([nothing if one is None else one for one in total[stride - 1 :: stride]])
        hit(REDUCTION)  # of one pipeline nothing else is reduced
        total[stride - 1 :: stride] = self._placement.pipe.comm.broadcast(mine, self._placement.last).unbind(
            0
        )
        step.give(total)

    def norm(self, held: Sequence[Tensor | None], *, wanted: bool) -> Tensor | None:  # noqa: ARG002
        """Return the norm over all stages: the norm of the tensors' norms, in the model's order."""
        if not wanted:
            return None
        trained, pipe = self._placement.trained, self._placement.pipe
        mine = {
            place: one.grad
            for place, one in zip(self._places, self.step.parameters, strict=True)
            if one.grad is not None
        }
        values, there = pipe.comm.all_reduce(placed_norms(mine, len(trained), pipe.device))
        types = [dtype for dtype, found in zip(trained.values(), there.tolist(), strict=True) if found]
        return total_norm(values[there > 0], types)

    def combine_buffers(self, buffers: Buffers) -> None:  # noqa: ARG002
        """Make one value of what all shards made of each buffer, stage by stage."""
        for stage in self._placement.stages.values():
            super().combine_buffers(stage.buffers)

    def abandon(self) -> None:
        """Release the group: it is broken."""
        vars(self).pop("_post_backward", None)

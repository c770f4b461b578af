"""The gradients and losses of one worker's stages through one step: summed over micro-batches, shards and pipelines.

A list of gradients holds those of all parameters of this worker, then the ledger (sum of losses, weight), then for each
auxiliary term the same again. Only the worker of the last stage knows losses; it tells the others once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.compat import foreach
from paceline.errors import InputError
from paceline.reduce.norms import total_norm
from paceline.reduce.post_backward import PostBackwardReduce
from paceline.reduce.tree import Gradients, TreeSum
from paceline.strategies.auxiliary import check_terms
from paceline.strategies.base import StepWork
from paceline.strategies.gradients import ledger_entry
from paceline.strategies.guards.loss_checks import check_loss
from paceline.strategies.memory.recompute import check_passes
from paceline.strategies.pipeline.stage import Micro, Stage
from paceline.strategies.step_state import StepState
from paceline.task import Loss
from paceline.world import World


class Sums:
    """What a pass brings in, shard by shard, and the totals over the global batch."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        late: PostBackwardReduce,
        step: StepState,
        trained: Mapping[str, torch.dtype],
        pipe: World,
    ) -> None:
        self.parameters = [parameter for stage in stages.values() for parameter in stage.parameters]
        self._step, self._auxiliary = step, step.auxiliary
        self.terms: list[str] = []
        """The auxiliary terms of the loss, once seen."""
        self.agreed = False
        """Whether all workers have agreed on the terms."""
        self._late, self._pipe, self._device = late, pipe, pipe.device
        self._stages = len(stages)
        self._offsets: dict[int, int] = {}
        offset = 0
        for index, stage in stages.items():
            self._offsets[index] = offset
            offset += len(stage.parameters)
        self.trained = trained
        """The trainable parameters of the whole model with their types, in its order."""
        self.places = _places(stages, trained)
        """Where this worker's parameters are in that order."""
        self._scales: dict[tuple[int, torch.dtype], Tensor] = {}

    def begin(self, work: StepWork) -> None:
        """Start a step with nothing; its state has begun."""
        self._size, self._totals = work.size, self._step.totals
        self._tree = TreeSum(self._step.shards)
        self._order = [shard.index for shard in work.shards]
        self._open = {shard.index: len(shard.batches) * self._stages for shard in work.shards}
        self._made: dict[int, Gradients] = {}
        self._add_finished()

    # What a pass tells.

    def loss(self, micro: Micro, loss: Loss) -> None:
        """Enter a loss into the ledger."""
        check_loss(loss)
        if not loss.total.requires_grad:
            raise InputError(
                "the loss depends on nothing that is trained here. Leave out .detach() and no_grad(); or a stage begins inside "
                "torch.no_grad() or checkpoint(use_reentrant=True), where pp cannot follow: name other cuts in "
                "pipeline_stages(), or use use_reentrant=False."
            )
        names = sorted(loss.auxiliary)
        if not self.agreed:
            self.terms = self.terms or names
        check_terms(names, self.terms)
        if names:
            check_passes(self._step.recompute)
        parts = [loss, *(loss.auxiliary[name] for name in names)]
        self._totals += [(micro.shard, part.total.detach()) for part in parts]
        stride = len(self.parameters) + 1
        for term, part in enumerate(parts):
            self._add(micro.shard, stride * (term + 1) - 1, [ledger_entry(part, self._size)])

    def gradients(self, micro: Micro, stage: Stage, made: Sequence[Gradients]) -> None:
        """Add the gradients of one micro-batch; they come with the auxiliary terms first."""
        stride, offset = len(self.parameters) + 1, self._offsets[stage.index]
        for place, row in enumerate((made[-1], *made[:-1])):
            self._add(micro.shard, place * stride + offset, row)
        self._open[micro.shard] -= 1
        self._add_finished()

    def scale(self, dtype: torch.dtype) -> Tensor:
        """Return the gradient that the backward pass starts from: one over the samples of the global batch."""
        key = (self._size, dtype)
        if key not in self._scales:
            self._scales[key] = torch.tensor(1.0 / self._size, dtype=dtype, device=self._device)
        return self._scales[key]

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
            self._tree.add((shard, shard + 1), self._made.pop(shard, []))

    # The totals.

    def agree(self, told: Sequence[list[str]]) -> None:
        """Settle the auxiliary terms, once: a worker without a sample has seen none."""
        self.terms = max(told, key=len)
        self._auxiliary.names, self._auxiliary.agreed = self.terms, True
        self.agreed = True

    def combine(self, last: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Make `.grad` hold the sum over the global batch; gives (total, weight) of the loss and of each term.

        `last` is the worker of this pipeline that knows the losses.
        """
        ledger = torch.zeros(2, device=self._device)
        stride = len(self.parameters) + 1
        total = self._late.sum(self._tree, [*self.parameters, ledger] * (1 + len(self.terms)))
        mine = [ledger if one is None else one for one in total[stride - 1 :: stride]]
        entries = list(self._pipe.comm.broadcast(torch.stack(mine), last).unbind(0))
        for place, entry in enumerate(entries):
            total[stride * (place + 1) - 1] = entry
        for parameter, gradient in zip(self.parameters, total, strict=False):
            parameter.grad = gradient
        self._auxiliary.give(total[stride:])
        return entries[0], dict(zip(self.terms, entries[1:], strict=True))


def norm_over_stages(sums: Sums, pipe: World) -> Tensor:
    """Return the norm over all stages: the norm of the tensors' norms, in the model's order."""
    # In 64 bits no norm is rounded, whatever the type of its parameter.
    norms = torch.zeros(2, len(sums.trained), dtype=torch.float64, device=pipe.device)
    for place, parameter in zip(sums.places, sums.parameters, strict=True):
        if parameter.grad is not None:
            # CUDA's norm adds in an order that depends on where a tensor lies in memory; fresh copies all lie alike.
            lying = parameter.grad.clone() if parameter.grad.is_cuda else parameter.grad
            (norms[0, place],) = foreach.norm([lying])  # what clip_grad_norm_ takes
            norms[1, place] = 1.0
    # Each place has one worker that is not zero there, so nothing is rounded.
    values, there = pipe.comm.all_reduce(norms)
    types = [dtype for dtype, found in zip(sums.trained.values(), there.tolist(), strict=True) if found]
    return total_norm(values[there > 0], types)


def _places(stages: Mapping[int, Stage], trained: Iterable[str]) -> list[int]:
    order = {name: place for place, name in enumerate(trained)}
    places = []
    for stage in stages.values():
        names = {id(value): name for name, value in stage.body.root.named_parameters()}
        places += [order[names[id(parameter)]] for parameter in stage.parameters]
    return places

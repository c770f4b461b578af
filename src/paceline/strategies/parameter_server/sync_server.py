"""A server that waits for all trainers, and updates as one process would: `--staleness 0`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.data import owned_shards
from paceline.reduce.norms import placed_norms, total_norm
from paceline.reduce.tree import TreeSum, cover
from paceline.strategies.base import StrategyInputs
from paceline.strategies.buffers.buffers import Buffers
from paceline.strategies.parameter_server.packing import HostPacking
from paceline.strategies.parameter_server.server import ServerPlacement
from paceline.strategies.reducer import Reducer
from paceline.strategies.result import StepResult
from paceline.world import World


class SyncReducer(Reducer):
    """The sums of what all trainers bring for a step."""

    shows_sums = False
    narrows = False

    def __init__(self, inputs: StrategyInputs, world: World, placement: ServerPlacement) -> None:
        super().__init__(placement.peers)
        self._placement = placement
        trainers = range(placement.trainers)
        carried = [owned_shards(rank, len(trainers), inputs.shards, world.shares) for rank in trainers]
        self._nodes = [cover(owned.start, owned.stop, inputs.shards) for owned in carried]
        """The subtrees that each trainer brings, from left to right."""
        self._brought: list[HostPacking] = []

    def finish(self) -> None:
        """Wait for all trainers, and make `.grad` the sum over all shards, along the tree."""
        step, placement = self.step, self._placement
        placement.pushes = placement.receive(placement.trainers)
        for push in placement.pushes:
            placement.wired.compare(step.work.number, push.trainer, push.content["members"])
        placement.take_options(placement.pushes)
        names = placement.pushes[0].content["names"]
        step.auxiliary.names = names
        if not self._brought:
            self._brought = [HostPacking([*step.parameters, step.loss_stats] * (len(names) + 1))]
        tree = TreeSum(step.shards)
        for push, nodes in zip(placement.pushes, self._nodes, strict=True):
            for node, packed in zip(nodes, push.content["packed"], strict=True):
                tree.add(node, self._brought[0].unpack(packed, placement.world.device))
        step.give(tree.nodes[0][1])

    def result(self) -> StepResult | None:
        """Return what the step came to; the trainers are told where it came to nothing."""
        found = super().result()
        if found is None:
            self._placement.answer(None)
        return found

    def refused(self, result: StepResult) -> None:
        """Send the refused result to the trainers, which find the same."""
        self._placement.answer(result)

    def combine_buffers(self, buffers: Buffers) -> None:
        """Wait for those of the trainers, which come with the gradients."""

    def norm(self, held: Sequence[Tensor | None], *, wanted: bool) -> Tensor | None:  # noqa: ARG002
        """Wait until every server has every gradient, and return the norm over all of them in the model's order."""
        step, placement = self.step, self._placement
        mine = {
            place: one.grad
            for place, one in zip(placement.places, step.parameters, strict=True)
            if wanted and one.grad is not None
        }
        norms = placed_norms(mine, len(placement.every) if wanted else 1, placement.world.device)
        every = self.world.comm.all_gather(norms) if self.world.size > 1 else [norms]
        if not wanted:
            return None
        whole = torch.stack(every).sum(0)  # each place has one owner; the others add zeros
        present = whole[1] > 0
        types = [one.dtype for one, there in zip(placement.every, present.tolist(), strict=True) if there]
        return total_norm(whole[0][present], types) if types else None

"""A server that waits for all trainers, and updates as one process would: `--staleness 0`."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.data import owned_shards
from paceline.errors import InputError, NonFiniteLossError
from paceline.reduce.norms import total_norm
from paceline.reduce.tree import TreeSum, cover
from paceline.strategies import gradients
from paceline.strategies.base import StrategyInputs
from paceline.strategies.parameter_server.parcel import Packing
from paceline.strategies.parameter_server.push_queue import Push
from paceline.strategies.parameter_server.server import ServerReplica
from paceline.strategies.result import StepResult
from paceline.world import World
from paceline.world.fault_points import OPTIMIZER, hit


class SyncServer(ServerReplica):
    """Takes steps with all trainers together."""

    def __init__(self, parts: StrategyInputs, world: World) -> None:
        super().__init__(parts, world)
        carried = [
            owned_shards(rank, self._trainers, parts.shards, world.shares) for rank in range(self._trainers)
        ]
        self._nodes = [cover(owned.start, owned.stop, parts.shards) for owned in carried]
        """The subtrees that each trainer brings, from left to right."""
        self._brought: list[Packing] = []

    def apply(self, max_grad_norm: float | None) -> StepResult:
        """Combine what all trainers bring, normalise, clip by the norm over all servers, update, answer."""
        letters = self._letters(self._trainers)
        self._add_up(letters)
        entry = self.ledger.grad
        if entry is None:
            self._desk.answer(letters, self._answer(None, None, {}))
            raise InputError(
                f"step {self._work.number}: step.backward was never called, so there is nothing to apply."
            )
        result = self._result(entry)
        terms = result.terms
        try:
            result.check()
        except NonFiniteLossError:
            self._desk.answer(letters, self._answer(result, entry, terms))
            raise
        factor = self._factor(result)
        if self.auxiliary.names:
            self.auxiliary.merge(self._work.size, factor)
            factor = 1.0
        held = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = self._meet(max_grad_norm)
        if norm is not None and max_grad_norm is not None:
            result.norm = norm = norm * factor
            try:
                result.check_norm()  # the same on all servers, and on the trainers once they are answered
            except NonFiniteLossError:
                self._desk.answer(letters, self._answer(result, entry, terms))
                raise
            factor = factor * torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0)
        if held:
            gradients.finish(held, factor, None)
        # All servers have all that they need: nothing can fail half-way from here on.
        hit(OPTIMIZER)
        self._update()
        self._check_slots()
        self._keep_buffers(letters[0].content["buffers"])
        self._desk.answer(letters, self._answer(result, entry, terms))
        for parameter in self.tracked:
            parameter.grad = None
        return result

    def _add_up(self, letters: list[Push]) -> None:
        """Make `.grad` the sum over all shards, along the tree."""
        names = letters[0].content["names"]
        self.auxiliary.names = names
        if not self._brought:
            self._brought = [Packing([*self.parameters, self.ledger] * (len(names) + 1))]
        tree = TreeSum(self._shards)
        for letter, nodes in zip(letters, self._nodes, strict=True):
            for node, parcel in zip(nodes, letter.content["parcels"], strict=True):
                tree.add(node, self._brought[0].unpack(parcel, self.world.device))
        self._give(tree.nodes[0][1])

    def _meet(self, max_grad_norm: float | None) -> Tensor | None:
        """Wait until every server has every gradient, and give the norm over all of them in the model's order."""
        device = self.world.device
        # In a type that holds every norm as it is.
        norms = torch.zeros(
            2, len(self._all) if max_grad_norm is not None else 1, dtype=torch.float64, device=device
        )
        if max_grad_norm is not None:
            held = {
                place: one.grad
                for place, one in zip(self._places, self.parameters, strict=True)
                if one.grad is not None
            }
            # As `gradients.finish` does it in one process: fresh copies all lie alike in a GPU's memory.
            placed = [one.clone() if one.is_cuda else one for one in held.values()]
            for place, norm in zip(held, torch._foreach_norm(placed) if placed else (), strict=True):  # noqa: SLF001
                norms[0, place], norms[1, place] = norm, 1.0
        every = self._peers.comm.all_gather(norms) if self._peers.size > 1 else [norms]
        if max_grad_norm is None:
            return None
        whole = torch.stack(every).sum(0)  # each place has one owner; the others add zeros
        present = whole[1] > 0
        types = [one.dtype for one, there in zip(self._all, present.tolist(), strict=True) if there]
        return total_norm(whole[0][present], types) if types else None

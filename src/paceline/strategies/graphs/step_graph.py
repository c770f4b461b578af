"""One captured step: everything from the batches to the gradients that the optimizer takes, replayed by a single launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from paceline.strategies.base import LossFunction, StepWork
from paceline.strategies.graphs.generators import ShardGenerators
from paceline.strategies.graphs.inputs import StaticInputs
from paceline.strategies.result import StepResult
from paceline.strategies.step_state import StepState
from paceline.world import World


class Computing(Protocol):
    """What computes the steps that are captured: a replica."""

    world: World
    step_state: StepState

    def computed(self, work: StepWork, loss: LossFunction, max_grad_norm: float | None) -> StepResult:
        """Compute the gradients that the optimizer takes."""

    def seeding_shards(self, seed: Callable[[int], None]) -> AbstractContextManager[None]:
        """Have the random streams of shards set otherwise, for the duration of the context."""


class StepGraph:
    """The forward and backward passes of a step, the sums over its shards, their division and clipping."""

    def __init__(
        self, replica: Computing, work: StepWork, loss: LossFunction, max_grad_norm: float | None
    ) -> None:
        """Capture a step; nothing of it is computed yet. Raise what keeps it from being captured."""
        device = replica.world.device
        self._replica = replica
        self._inputs = StaticInputs(work, device)
        self._generators = ShardGenerators(work, device)
        self._graph = torch.cuda.CUDAGraph()
        self._generators.register(self._graph)
        # Other threads may use CUDA meanwhile: one that pins batches, say.
        with (
            self._generators.capturing(),
            replica.seeding_shards(self._generators.enter_shard),
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
        ):
            self._result = replica.computed(self._inputs.work, loss, max_grad_norm)
            state = replica.step_state
            self._shards = [shard for shard, _ in state.totals]
            kind = state.loss_stats.dtype
            totals = [total.to(kind).reshape(()) for _, total in state.totals]
            self._packed = torch.cat(
                [one.reshape(-1).to(kind) for one in (*self._result.numbers().values(), *totals)]
            )
        self.gradients: list[Tensor | None] = [parameter.grad for parameter in state.tracked]

    def run(self, work: StepWork, tensors: Sequence[Tensor]) -> None:
        """Compute the gradients of another step, whose batches these tensors are made of."""
        self._inputs.fill(tensors)
        self._generators.seed(work)
        self._graph.replay()

    def replay(self, work: StepWork, tensors: Sequence[Tensor]) -> StepResult:
        """Do so, and set `.grad` to what came out; return what the step came to."""
        self.run(work, tensors)
        state = self._replica.step_state
        state.work, state.left = work, 0
        for parameter, gradient in zip(state.tracked, self.gradients, strict=True):
            parameter.grad = gradient
        captured = self._result
        result = StepResult(work.number, work.size, captured.entry, captured.terms)
        result.norm, result.applied_factor, result.scaled = (
            captured.norm,
            captured.applied_factor,
            captured.scaled,
        )
        # The next replay writes to the same memory, so the numbers leave it now.
        rest = result.send_packed(self._packed)
        state.totals = list(zip(self._shards, rest, strict=True))
        return result

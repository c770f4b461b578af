"""Adds up the gradients of one worker's stages over micro-batches, shards and pipelines."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.reduce.post_backward import PostBackwardReduce
from paceline.strategies.base import StepWork, StrategyInputs
from paceline.strategies.buffers.buffers import Buffers
from paceline.strategies.pipeline.placement import StagePlacement
from paceline.strategies.pipeline.sums import Sums, norm_over_stages
from paceline.strategies.reducer import Reducer
from paceline.strategies.result import StepResult
from paceline.strategies.step_state import StepState
from paceline.world import World, all_gather_object


class StageReducer(Reducer):
    """The gradients of stages; passes bring them in micro-batch by micro-batch (`sums`)."""

    watches = True
    sums: Sums
    """There once the model is cut."""

    def __init__(self, inputs: StrategyInputs, world: World, placement: StagePlacement) -> None:
        super().__init__(placement.data)
        self._everybody, self._placement = world, placement
        self._late: PostBackwardReduce | None = PostBackwardReduce(
            placement.data, inputs.shards, inputs.transport
        )

    def wire(self, step: StepState) -> None:
        """Take hold of what this worker's stages train."""
        super().wire(step)
        # In one pipeline a stage goes through the shards as one process does, and torch finds what a pass back still needs.
        step.counts_writes = self.world.size > 1
        if self._late is not None and self._placement.is_cut:
            placement = self._placement
            self.sums = Sums(placement.stages, self._late, step, placement.trained, placement.pipe)

    def begin(self, work: StepWork) -> None:
        """Start a step with nothing."""
        self.sums.begin(work)

    def finish(self) -> None:
        """Make `.grad` hold the sum over the whole global batch."""
        if not self.sums.agreed:
            self.sums.agree(all_gather_object(self._everybody.comm, self.sums.terms))
        self._entry, self._terms = self.sums.combine(self._placement.last)

    def result(self) -> StepResult:
        """Return what the step came to."""
        work = self.step.work
        return StepResult(work.number, work.size, self._entry, self._terms)

    def norm(self, held: Sequence[Tensor | None], *, wanted: bool) -> Tensor | None:  # noqa: ARG002
        """Return the norm of the gradients of all stages."""
        return norm_over_stages(self.sums, self._placement.pipe) if wanted else None

    def combine_buffers(self, buffers: Buffers) -> None:  # noqa: ARG002
        """Make one value of what all shards made of each buffer, stage by stage."""
        for stage in self._placement.stages.values():
            super().combine_buffers(stage.buffers)

    def abandon(self) -> None:
        """Release the group: it is broken."""
        self._late = None
        vars(self).pop("sums", None)

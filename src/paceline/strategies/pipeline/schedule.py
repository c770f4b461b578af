"""The order of a pipeline's passes: all shards at once, as micro-batches that follow each other through the stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain as chained
from typing import Any

from paceline.errors import InputError
from paceline.strategies.base import LossFunction, MetricsFunction, Rows, StepWork
from paceline.strategies.pipeline.order import forward_programs, programs
from paceline.strategies.pipeline.placement import StagePlacement
from paceline.strategies.pipeline.reducer import StageReducer
from paceline.strategies.pipeline.runtime import PipelineRuntime
from paceline.strategies.pipeline.stage import Micro
from paceline.strategies.pipeline.streams import Standing
from paceline.strategies.schedule import Passes, Schedule, evaluating
from paceline.world import broadcast_object
from paceline.world.fault_points import BACKWARD, hit


class PipelineSchedule(Schedule):
    """A program of forward and backward passes, sends and receives for each worker."""

    whole_step_only = (
        "pp needs step.compute(loss): no worker holds the whole model, so a loop cannot call it batch by batch. "
        "Give the loss as a function, or use another strategy."
    )

    def __init__(self, name: str, placement: StagePlacement, reducer: StageReducer) -> None:
        """`name` is that of the order: gpipe, 1f1b, interleaved or zero-bubble."""
        self._name, self._placement, self._reducer = name, placement, reducer

    # The cut.

    def _cut(self, passes: Passes, batches: Iterable[Any], function: LossFunction | MetricsFunction) -> None:
        """Cut the model, where that is yet to be done, by the first batch that some worker has."""
        placement = self._placement
        if placement.is_cut:
            return
        placement.agree_on_cut(placement.propose_cut(batches, function))
        if placement.is_cut:
            passes.take_hold()

    # Passes.

    def train(self, passes: Passes, work: StepWork, loss: LossFunction) -> None:
        """Compute all passes of a step, the first one of a model that has just been cut."""
        placement = self._placement
        self._cut(passes, (batch for shard in work.shards for batch in shard.batches), loss)
        if not placement.is_cut:
            raise InputError(
                f"step {work.number}: no worker has a sample, so there is nothing to learn from."
            )
        passes.open_step(work)
        pipe = placement.pipe
        for stage in placement.stages.values():
            stage.body.begin()
        for micros in self._rounds(passes, work):
            program = programs(self._name, pipe.size, placement.stage_count, len(micros))[pipe.rank]
            hit(BACKWARD)
            PipelineRuntime(placement, micros).train(program, loss, self._reducer)
        for stage in placement.stages.values():
            stage.body.end()
            stage.own_buffers()

    def _rounds(self, passes: Passes, work: StepWork) -> Iterator[list[Micro]]:
        """Return the micro-batches of all shards, one of each at a time.

        The random streams of a shard's second micro-batch begin where those of its first ended, on the last stage.
        """
        ended: dict[int, Standing | None] = {}
        for part in range(max((len(shard.batches) for shard in work.shards), default=0)):
            micros = [
                Micro(
                    shard.index,
                    shard.seed,
                    part,
                    part == len(shard.batches) - 1,
                    passes.placed(shard.batches[part]),
                )
                for shard in work.shards
                if part < len(shard.batches)
            ]
            if part:
                streams = broadcast_object(self._placement.pipe.comm, ended, self._placement.last)
                for micro in micros:
                    micro.stream = streams[micro.shard]
            yield micros
            ended = {micro.shard: micro.ended for micro in micros if not micro.final}

    def measure(self, passes: Passes, works: Iterable[StepWork], metrics: MetricsFunction) -> Rows:
        """Measure this pipeline's shards; the worker of the last stage has the rows."""
        works, seen, placement = iter(works), list[StepWork](), self._placement
        if not placement.is_cut:
            for work in works:
                seen.append(work)
                if any(shard.batches for shard in work.shards):
                    break
            batches = (batch for work in seen for shard in work.shards for batch in shard.batches)
            self._cut(passes, batches, metrics)
        rows: Rows = {}
        for stage in placement.stages.values():
            stage.body.begin()
        running = [one for stage in placement.stages.values() for one in stage.body.modules()]
        pipe = placement.pipe
        placement.refresh()
        try:
            with evaluating(passes.model, running) as restore:
                for work in chained(seen, works):
                    for micros in self._rounds(passes, work):
                        order = forward_programs(pipe.size, placement.stage_count, len(micros))[pipe.rank]
                        made = PipelineRuntime(placement, micros).measure(order, metrics, restore)
                        rows |= {
                            (work.number, micros[place].shard, micros[place].part): row
                            for place, row in made.items()
                        }
        finally:
            placement.release()
        return rows

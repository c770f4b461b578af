"""One worker of a pipeline: its stages, its part of the state, and its place in every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain as chained
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from paceline.data import to_device
from paceline.errors import InputError
from paceline.reduce.post_backward import PostBackwardReduce
from paceline.state.chunks import Catalogue, LocalState, Read
from paceline.state.optimizer_state import check_own_entries
from paceline.strategies.absent import StageParameters, present
from paceline.strategies.base import (
    LossFunction,
    MetricsFunction,
    Rows,
    ShardWork,
    StepWork,
    StrategyInputs,
)
from paceline.strategies.buffer_snapshot import BufferSnapshot
from paceline.strategies.buffers import Buffers, gather_rows
from paceline.strategies.loss_checks import check_trainable
from paceline.strategies.partial_update import PartialUpdate, Scope, check_half
from paceline.strategies.pipeline.attributes import StageAttributes
from paceline.strategies.pipeline.call import Function, call_of
from paceline.strategies.pipeline.order import forward_programs, programs, stages_per_worker
from paceline.strategies.pipeline.rows import CutRows, NoRows
from paceline.strategies.pipeline.runtime import PipelineRuntime
from paceline.strategies.pipeline.share import make_stage
from paceline.strategies.pipeline.stage import Micro, Stage
from paceline.strategies.pipeline.stage_state import StageState
from paceline.strategies.pipeline.stages import Chain, chain_of
from paceline.strategies.pipeline.streams import Standing
from paceline.strategies.pipeline.sums import Sums, finish
from paceline.strategies.recompute import recompute_blocks
from paceline.strategies.refusals import refuse_sparse
from paceline.strategies.result import StepResult
from paceline.strategies.trained import Places, Trained, check_equal, check_held
from paceline.strategies.writes import Writes
from paceline.task import Loss
from paceline.world import World, all_gather_object, broadcast_object, seeds
from paceline.world.fault_points import BACKWARD, FORWARD, OPTIMIZER, hit


class PipelineReplica:
    """One worker's stages, wired to those of the others."""

    whole = False
    reads_whole = False
    computes = True

    def __init__(self, inputs: StrategyInputs, world: World) -> None:
        self.world, self._inputs = world, inputs
        self._pipe = world.along("pp")
        """The workers of this pipeline."""
        self._data = world.along("ddp", "fsdp")
        """Those that hold the same stages in other pipelines."""
        self._place = world.along("fsdp")
        """Those among them that share the parameters."""
        self._late = PostBackwardReduce(self._data, inputs.shards, inputs.transport)
        self._model = inputs.model
        refuse_sparse(self.model, "pp")
        self._writes: Writes | None = None
        self._trained = {name: one.dtype for name, one in self.model.named_parameters() if one.requires_grad}
        check_trainable(self._trained)
        recompute_blocks(self.model, inputs.structure, inputs.tuning)
        Buffers(self.model, inputs.buffer_rules, inputs.shards)  # checks the rules against the whole model
        optimizer = inputs.optimizer(self.model)
        check_held(self.model, optimizer)
        check_own_entries(optimizer, kept=False)
        self._partial_update = PartialUpdate(
            optimizer, Scope.ROWS if self._place.size > 1 else Scope.PARAMETERS, world.device
        )
        if self._place.size > 1:
            check_half(optimizer, world.device)
        self._keeping = StageState(self.model, optimizer, inputs.scheduler(optimizer))
        self.optimizer, self.scheduler = self._keeping.optimizer, self._keeping.scheduler
        self.scaler: torch.amp.GradScaler | None = None
        self.totals: list[tuple[int, Tensor]] = []
        self.has_updated = False
        """Whether the step in flight has begun to change what the optimizer keeps."""
        self._schedule = inputs.tuning.schedule
        self._stage_count = self._pipe.size * (
            inputs.tuning.stages_per_worker or stages_per_worker(self._schedule)
        )
        self._last = (self._stage_count - 1) % self._pipe.size
        """The worker that holds the last stage."""
        self._stages: dict[int, Stage] = {}
        self._names: dict[int, frozenset[str]] = {}
        """The tensors of each stage of this worker."""
        self._rows = NoRows()
        self.chain: Chain | None = None
        kept = None if inputs.previous is None else inputs.previous.placement.carried.get("chain")
        self._agree_on_cut(kept)

    @property
    def placement(self) -> PipelineReplica:
        """What a group that forms anew asks for what it may want to know."""
        return self

    @property
    def carried(self) -> dict[str, Any]:
        """The cut."""
        return {"chain": self.chain}

    def restore(self) -> None:
        """Do nothing: the model is made anew."""

    @property
    def model(self) -> nn.Module:
        """The whole model; from the cut on it has the values of this worker's tensors alone."""
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        """Work with the modules that a loop holds: they have become the ones that were made for this group."""
        self._model = self._keeping.model = model
        if self.chain is not None:
            self._wire(self.chain)

    # The cut.

    def _agree_on_cut(self, proposal: Chain | InputError | None) -> None:
        """Cut as the first worker says that knows how; workers without a sample know nothing of the model's shapes."""
        told = [one for one in all_gather_object(self.world.comm, proposal) if one is not None]
        if not told:
            return
        if isinstance(told[0], InputError):
            raise told[0]
        self.chain = told[0]
        self._cut(self.chain)

    def _propose(self, batches: Iterable[Any], function: Function) -> Chain | InputError | None:
        """Find the cut from the first batch; one worker of each pipeline does it, for it takes seconds of imports."""
        for batch in batches:
            if self._pipe.rank:
                break
            try:
                args, kwargs = call_of(function, batch)
                return chain_of(self.model, self._inputs.structure.stages, args, kwargs)
            except InputError as error:
                return error
        return None

    def _cut(self, chain: Chain) -> None:
        """Keep this worker's stages and let go of the others."""
        starts = chain.cut(self._stage_count)
        places = chain.places(starts)
        mine = range(self._pipe.rank, self._stage_count, self._pipe.size)
        self._names = {
            stage: frozenset(name for name, place in places.items() if place == stage) for stage in mine
        }
        kept = frozenset().union(*self._names.values())
        self._keeping.move(kept, self.world.device)
        self._keeping.keep(kept, self.world.device)
        if self._place.size > 1:
            self._rows = CutRows(self._place, dict(present(self.model.named_parameters())))
            self._keeping.cut_up(self._rows)
            self._rows.let_go()
        self._wire(chain)

    def _wire(self, chain: Chain) -> None:
        """Make what runs this worker's stages out of the model."""
        starts, inputs = chain.cut(self._stage_count), self._inputs
        bodies = {
            stage: make_stage(self.model, chain, starts, stage, names) for stage, names in self._names.items()
        }
        self._stages = {
            stage: Stage(stage, self._stage_count, body, self._names[stage], inputs, self.world.device)
            for stage, body in bodies.items()
        }
        for stage in self._stages.values():
            stage.attributes = StageAttributes(stage.body, list(bodies.values()))
        self._sums = Sums(self._stages, self._late, inputs, self._trained, self._pipe)
        share = StageParameters(self.model, frozenset().union(*self._names.values()))
        self._wired, self._parameters = Trained(share, self.optimizer), Places(self.model)
        self._writes = Writes(share.named_parameters())
        self._conveyor = PipelineRuntime(self._pipe, self._stages, self._on_batch)

    # One step.

    def step(self, work: StepWork, loss: LossFunction, max_grad_norm: float | None) -> StepResult:
        """Compute one optimizer step over one exact global batch."""
        # The cut takes from the model and the optimizer what others hold.
        self.has_updated = self.chain is None
        if self.chain is None:
            self._agree_on_cut(
                self._propose((batch for shard in work.shards for batch in shard.batches), loss)
            )
        if self.chain is None:
            raise InputError(
                f"step {work.number}: no worker has a sample, so there is nothing to learn from."
            )
        self._partial_update.check()
        self._wired.check("pp")
        self._wired.check_hooks()
        self._parameters.check()
        self.totals = []
        self._rows.gather()
        self._sums.begin(work, self.totals)
        if self._writes is not None:
            self._writes.begin()
        for stage in self._stages.values():
            stage.body.begin()
            stage.buffers.begin()
        for micros in self._rounds(work):
            program = programs(self._schedule, self._pipe.size, self._stage_count, len(micros))[
                self._pipe.rank
            ]
            hit(BACKWARD)
            self._conveyor.train(program, micros, loss, self._sums)
        for stage in self._stages.values():
            stage.body.end()
            stage.own_buffers()
        return self._apply(work, max_grad_norm)

    def _rounds(self, work: StepWork) -> Iterator[list[Micro]]:
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
                    self._placed(shard.batches[part]),
                )
                for shard in work.shards
                if part < len(shard.batches)
            ]
            if part:
                streams = broadcast_object(self._pipe.comm, ended, self._last)
                for micro in micros:
                    micro.stream = streams[micro.shard]
            yield micros
            ended = {micro.shard: micro.ended for micro in micros if not micro.final}

    def _apply(self, work: StepWork, max_grad_norm: float | None) -> StepResult:
        sums = self._sums
        self._wired.check("pp")
        if self._writes is not None:
            # In one pipeline a stage goes through the shards as one process does, and torch finds what a pass back still needs.
            self._writes.check(work.number, counted=self._data.size > 1)
        if not sums.settled:
            sums.agree(all_gather_object(self.world.comm, sums.terms))
        entry, terms = sums.combine(self._last)
        result = StepResult(work.number, work.size, entry, terms)
        if entry.device.type == "cpu":
            result.check()  # elsewhere the loop asks one step later, so that no GPU waits for the question
        for stage in self._stages.values():
            stage.buffers.combine(self._agree_on_buffers(stage), self._gather_buffers(stage))
        factor = result.factor
        if sums.terms:
            sums.auxiliary.merge(work.size, factor)
            factor = 1.0
        result.norm = finish(sums, self._pipe, factor, max_grad_norm)
        if entry.device.type == "cpu":
            result.check_norm()
        self._partial_update.check()
        self._rows.hand_over()
        hit(OPTIMIZER)
        self.has_updated = True
        self.optimizer.step()
        self._rows.let_go()
        if self.scheduler is not None:
            self.scheduler.step()
        for stage in self._stages.values():
            stage.buffers.settle()
        return result

    def _agree_on_buffers(self, stage: Stage) -> Any:
        def agree(names: list[str]) -> list[str]:
            every = {name for part in all_gather_object(self._data.comm, names) for name in part}
            return [name for name, _ in stage.share.named_buffers() if name in every]

        return agree

    def _gather_buffers(self, stage: Stage) -> Any:
        return lambda rows: gather_rows(rows, stage.buffers.like(), self._data, self._inputs.shards)

    def _on_batch(self) -> None:
        hit(FORWARD)
        self.world.pulse.batch()

    def _placed(self, batch: Any) -> Any:
        return to_device(batch, self.world.device, non_blocking=self.world.device.type == "cuda")

    # Evaluation.

    def evaluate(self, works: Iterable[StepWork], metrics: MetricsFunction) -> Rows:
        """Measure this pipeline's shards; the worker of the last stage has the rows."""
        works = iter(works)
        seen: list[StepWork] = []
        if self.chain is None:
            for work in works:
                seen.append(work)
                if any(shard.batches for shard in work.shards):
                    break
            batches = (batch for work in seen for shard in work.shards for batch in shard.batches)
            self._agree_on_cut(self._propose(batches, metrics))
        rows: Rows = {}
        for stage in self._stages.values():
            stage.body.begin()
        running = [one for stage in self._stages.values() for one in stage.body.modules()]
        buffers = BufferSnapshot(dict.fromkeys(running))
        # The whole model, too: a task may keep it, and it shares plain attributes with what runs.
        modes = [(one, one.training) for one in (*running, *self.model.modules())]
        for module, _ in modes:
            module.training = False
        self._rows.gather()
        try:
            with torch.no_grad(), seeds.preserved():
                for work in chained(seen, works):
                    for micros in self._rounds(work):
                        programs_ = forward_programs(self._pipe.size, self._stage_count, len(micros))
                        made = self._conveyor.measure(
                            programs_[self._pipe.rank], micros, metrics, buffers.restore_moved
                        )
                        rows |= {
                            (work.number, micros[place].shard, micros[place].part): row
                            for place, row in made.items()
                        }
        finally:
            buffers.restore()
            for module, mode in modes:
                module.training = mode  # a layer that the user froze stays frozen
            self._rows.let_go()
        return rows

    # State.

    def state(self) -> dict[str, Any]:
        """Return everything by name, independent of the strategy; all workers must ask together."""
        return self._keeping.state(self.world)

    def load(self, state: dict[str, Any]) -> None:
        """Take over this worker's part of a state, of this or another strategy."""
        self._keeping.load(state)

    def settle(self) -> None:
        """Refuse to save or report buffers in which the copies of a stage have parted."""
        if self._data.size > 1:
            named = {
                name: value
                for stage in self._stages.values()
                for name, value in stage.buffers.model.named_buffers()
            }
            check_equal(named.items(), self._data)

    def held(self) -> LocalState:
        """Return the tensors of this worker's stages."""
        if self.chain is not None:
            self._parameters.check()
        return self._keeping.held()

    def take(self, catalogue: Catalogue, read: Read, rest: Mapping[str, Any]) -> None:
        """Take over this worker's part of a whole state."""
        self._keeping.take(catalogue, read, rest)

    def buffers_put_back(self) -> list[Tensor]:
        """Return all of them: a loop never holds them while a step is in flight."""
        return list(self.model.buffers())

    def changing_buffers(self) -> list[Tensor]:
        """Return all of them."""
        return list(self.model.buffers())

    def abandon(self) -> None:
        """Forget the step under way: weights change only once every sum has arrived, buffers are put back."""
        for stage in self._stages.values():
            stage.own_buffers()
            stage.forget()
            stage.buffers.put_back()
        for _, parameter in present(self.model.named_parameters()):
            parameter.grad = None
        self._rows.let_go()
        if self._stages:
            self._sums = self._conveyor = None  # type: ignore[assignment]
        self._late = None  # type: ignore[assignment]

    # A loop of the user's own sees no whole model.

    def begin(self, work: StepWork) -> NoReturn:
        """Refuse: there is no model to call."""
        del work
        _refuse_own_loop()

    def shard(self, work: ShardWork) -> NoReturn:
        """Refuse as well."""
        del work
        _refuse_own_loop()

    def backward(self, loss: Loss) -> NoReturn:
        """Refuse as well."""
        del loss
        _refuse_own_loop()

    def combine(self) -> NoReturn:
        """Refuse as well."""
        _refuse_own_loop()

    def leaves(self) -> NoReturn:
        """Refuse as well."""
        _refuse_own_loop()

    def apply(self, max_grad_norm: float | None) -> NoReturn:
        """Refuse as well."""
        del max_grad_norm
        _refuse_own_loop()


def _refuse_own_loop() -> NoReturn:
    raise InputError(
        "pp needs step.compute(loss): no worker holds the whole model, so a loop cannot call it batch by batch. "
        "Give the loss as a function, or use another strategy."
    )

"""The stages of the model that live on one worker of a pipeline; all of the model, until it is cut.

Where the model is cut is found at the first batch. In a group that forms anew it is cut as before, at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.state.chunks import OPTIMIZER, Catalogue, ChunkBounds, LocalState, Read
from paceline.state.redistribution import own_bounds
from paceline.strategies.base import StrategyInputs
from paceline.strategies.buffers.buffers import Buffers, Rule
from paceline.strategies.guards.absent import StageParameters, present
from paceline.strategies.guards.overlaps import refuse_overlaps
from paceline.strategies.guards.partial_update import Scope, check_half
from paceline.strategies.guards.places import Places
from paceline.strategies.guards.refusals import refuse_sparse
from paceline.strategies.guards.trained import HasParameters, check_equal
from paceline.strategies.pipeline.call import Function, call_of
from paceline.strategies.pipeline.order import stages_per_worker
from paceline.strategies.pipeline.rows import CutRows, NoRows
from paceline.strategies.pipeline.share import make_stage
from paceline.strategies.pipeline.stage import Stage
from paceline.strategies.pipeline.stage_state import StageState
from paceline.strategies.pipeline.stages import Chain, chain_of
from paceline.strategies.placement import Optimize, Placement, check_same_start, sum_of_start
from paceline.strategies.result import StepResult
from paceline.world import World, all_gather_object


class StagePlacement(Placement):
    """Some stages of the model, whole or, beside `fsdp`, some rows of them."""

    def __init__(self, inputs: StrategyInputs, world: World) -> None:
        self._world = world
        self.pipe = world.submesh("pp")
        """The workers of this pipeline."""
        self.data = world.submesh("ddp", "fsdp")
        """Those that hold the same stages in other pipelines."""
        self._rows_among = world.submesh("fsdp")
        """Those among them that share the parameters."""
        self._model = inputs.model
        refuse_sparse(self._model, "pp")
        refuse_overlaps(self._model, held=True)
        if not inputs.weights_in_sync:
            check_same_start({name: sum_of_start(one) for name, one in self._model.named_parameters()}, world)
        Buffers(self._model, inputs.buffer_rules, inputs.shards)  # checks the rules against the whole model
        self.scope = Scope.ROWS if self._rows_among.size > 1 else Scope.PARAMETERS
        self.trained = {name: one.dtype for name, one in self._model.named_parameters() if one.requires_grad}
        """The trainable parameters of the whole model with their types, in its order."""
        tuning = inputs.tuning
        self.stage_count = self.pipe.size * (tuning.stages_per_worker or stages_per_worker(tuning.schedule))
        self.last = (self.stage_count - 1) % self.pipe.size
        """The worker that holds the last stage."""
        self.stages: dict[int, Stage] = {}
        """Those of this worker; none before the cut."""
        self._chain: Chain | None = None
        self._names: dict[int, frozenset[str]] = {}
        """The tensors of each stage of this worker."""
        self._rows: NoRows = NoRows()
        self._kept = None if inputs.previous is None else inputs.previous.placement.carried.get("chain")
        self._inputs = replace(inputs, previous=None)  # which would be kept in memory else

    @property
    def model(self) -> nn.Module:
        """The whole model; from the cut on it has the values of this worker's tensors alone."""
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        """Work with the modules that a loop holds: they have become the ones that were made for this group."""
        self._model = model
        self._state.work_with(model)
        if self._chain is not None:
            self._make_stages(self._chain)

    def adopt(self, optimizer: Optimizer) -> None:
        """Take over the optimizer, and cut where the group before did."""
        super().adopt(optimizer)
        if self._rows_among.size > 1:
            check_half(optimizer, self._world.device)
        self._state = StageState(self.model, optimizer)
        self.agree_on_cut(self._kept)

    # The cut.

    @property
    def is_cut(self) -> bool:
        """Whether this worker has its stages alone."""
        return self._chain is not None

    def propose_cut(self, batches: Iterable[Any], function: Function) -> Chain | InputError | None:
        """Find the cut from the first batch; one worker of each pipeline does it, for it takes seconds of imports."""
        for batch in batches:
            if self.pipe.rank:
                break
            try:
                args, kwargs = call_of(function, batch, self.model)
                return chain_of(self.model, self._inputs.structure.stages, args, kwargs)
            except InputError as error:
                return error
        return None

    def agree_on_cut(self, proposal: Chain | InputError | None) -> None:
        """Cut as the first worker says that knows how; workers without a sample know nothing of the model's shapes."""
        told = [one for one in all_gather_object(self._world.comm, proposal) if one is not None]
        if not told:
            return
        if isinstance(told[0], InputError):
            raise told[0]
        self._cut(told[0])

    def _cut(self, chain: Chain) -> None:
        """Keep this worker's stages and release the others."""
        places = chain.places(chain.cut(self.stage_count))
        mine = range(self.pipe.rank, self.stage_count, self.pipe.size)
        self._names = {
            stage: frozenset(name for name, place in places.items() if place == stage) for stage in mine
        }
        self._state.keep(self._held_names(), self.optimizer, self._world.device)
        if self._rows_among.size > 1:
            self._rows = rows = CutRows(self._rows_among, dict(present(self.model.named_parameters())))
            self._state.keep_rows(rows.parts, self.optimizer)
            rows.release()
        self._make_stages(chain)
        self._chain, self.carried = chain, {"chain": chain}

    def _held_names(self) -> frozenset[str]:
        return frozenset().union(*self._names.values())

    def _make_stages(self, chain: Chain) -> None:
        """Make what runs this worker's stages out of the model."""
        starts = chain.cut(self.stage_count)
        bodies = {
            stage: make_stage(self.model, chain, starts, stage, names) for stage, names in self._names.items()
        }
        self.stages |= {
            stage: Stage(stage, self.stage_count, bodies, names, self._inputs, self._world.device)
            for stage, names in self._names.items()
        }
        self.wired = Places(self.model, buffers=True)

    # What is here.

    @property
    def part(self) -> HasParameters:
        """The stages of this worker."""
        return StageParameters(self.model, self._held_names()) if self.is_cut else self.model

    def parameters(self) -> list[nn.Parameter]:
        """Return those of this worker's stages that train, stage by stage."""
        if not self.is_cut:
            return super().parameters()
        return [parameter for stage in self.stages.values() for parameter in stage.parameters]

    def make_buffers(self, rules: Mapping[str, Rule], shards: int) -> Buffers:
        """Return what takes the buffers of this worker's stages through a step."""
        return StageBuffers(self.model, self.stages) if self.is_cut else super().make_buffers(rules, shards)

    def refresh(self) -> None:
        """Gather the weights of this worker's stages, where they are sharded."""
        self._rows.gather()

    def update(self, optimize: Optimize, result: StepResult) -> None:  # noqa: ARG002
        """Update this worker's stages, or its rows of them."""
        self._rows.hand_over()
        optimize()
        self._rows.release()

    def release(self) -> None:
        """Free the gathered weights; the shards stay."""
        self._rows.release()

    def abandon(self) -> None:
        """Free weights that were gathered for a step that broke."""
        self.release()

    def check_reusable(self) -> None:
        """Raise from the cut on: this worker's module has its own stages alone."""
        if self.is_cut:
            raise InputError(
                "pp cannot form a new group with a model that was given as an object: this worker no longer has other stages. "
                "Give run.prepare functions that make model and optimizer, or use --no-elastic."
            )

    # State.

    def local_state(self) -> LocalState:
        """Return the tensors of this worker's stages."""
        return self._state.local_state(self.optimizer, {})

    def wanted(self, catalogue: Catalogue) -> dict[str, ChunkBounds]:
        """Return the bounds of what this worker's stages hold."""
        return own_bounds(self.local_state().chunks, catalogue)

    def load_local_state(self, catalogue: Catalogue, read: Read, extra_state: Mapping[str, Any]) -> None:
        """Load this worker's part of a whole state."""
        self._state.load_local_state(self.optimizer, catalogue, read, extra_state[OPTIMIZER])

    def gathered(self, held: LocalState, world: World) -> dict[str, Any]:
        """Put a whole state together of what everybody holds, in the order in which one process has it."""
        return self._state.gathered(held, world)

    def synchronize(self) -> None:
        """Refuse to save or report buffers in which the copies of a stage have parted."""
        if self.data.size > 1:
            named = {
                name: value
                for stage in self.stages.values()
                for name, value in stage.buffers.model.named_buffers()
            }
            check_equal(named.items(), self.data)


class StageBuffers(Buffers):
    """The buffers of all stages on this worker; each stage combines its own over the shards."""

    def __init__(self, model: nn.Module, stages: Mapping[int, Stage]) -> None:
        super().__init__(model, {}, shards=1)
        self._stages = stages

    def begin(self) -> None:
        """Note where every shard of this step starts from."""
        self.watched = True
        for stage in self._stages.values():
            stage.buffers.begin()

    def end_step(self) -> None:
        """Forget where the step started from."""
        for stage in self._stages.values():
            stage.buffers.end_step()

    def put_back(self) -> None:
        """Undo what an unfinished step did to them, and release its passes."""
        for stage in self._stages.values():
            stage.own_buffers()
            stage.forget()
            stage.buffers.put_back()

    def known(self) -> list[Tensor]:
        """Return all of them: a loop never holds them while a step is in flight."""
        return list(self.model.buffers())

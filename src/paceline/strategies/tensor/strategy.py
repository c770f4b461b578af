"""Each layer's matrices split among the workers, by torch's `parallelize_module`; data parallel beside it.

Workers beside each other in `tp` compute the same samples, each with its part of the split layers; everything between
those is computed by all of them alike. A worker's part is a model like any other (`tensor_model`), so along the data
sides of the mesh it is trained as any other: by itself, by `ddp` or by `fsdp`, with their sums along the canonical tree.

Level numeric. A product whose sum runs over n terms is a sum of as many partial sums as there are workers, so it differs
from one process's by at most n roundings: n * 2^-23 of the largest term. Masks of dropout are those of one process, and
so is everything else: after k steps weights are within 1e-5 + 5e-6 k of their length (`verify/proof/bounds.py`), as ddp's are
where torch adds in an order of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.state.chunks import Catalogue, ChunkBounds, LocalState, Read
from paceline.state.redistribution import own_bounds
from paceline.strategies import compression
from paceline.strategies.base import (
    BuiltInStrategy,
    Exactness,
    Leaves,
    LossFunction,
    StepWork,
    StrategyInputs,
)
from paceline.strategies.buffers.batchnorm import synchronise
from paceline.strategies.data_parallel.ddp_reducer import DdpReducer
from paceline.strategies.data_parallel.strategy import Ddp
from paceline.strategies.fsdp.strategy import Fsdp, shard
from paceline.strategies.guards.overlaps import refuse_overlaps
from paceline.strategies.guards.places import Places
from paceline.strategies.guards.refusals import refuse_hooks, refuse_references, refuse_sparse
from paceline.strategies.memory.whole_draws import refuse_draws
from paceline.strategies.placement import Placement, WholePlacement, spread_weights
from paceline.strategies.reducer import AroundReducer, Reducer
from paceline.strategies.replica import Replica
from paceline.strategies.schedule import Passes, Schedule
from paceline.strategies.step_state import StepState
from paceline.strategies.tensor.layers import Region, watch_region
from paceline.strategies.tensor.loss import SplitScores
from paceline.strategies.tensor.model import (
    ReadGuard,
    adopt,
    apply_tensor_parallel,
    chunks_of_whole,
    norm_of_parts,
    part_of_whole,
)
from paceline.strategies.tensor.plan import TensorPlan, make_plan
from paceline.strategies.tensor.proof import check_same_gradients, check_same_totals, proofs_of
from paceline.strategies.tuning import Tuning
from paceline.task import Loss
from paceline.world import World, determinism
from paceline.world.mesh import DATA, Mesh


class TensorParallel(BuiltInStrategy):
    """Matrices split among workers that see the same samples."""

    name = "tp"
    exactness = Exactness.NUMERIC

    def level(self, tuning: Tuning) -> Exactness:
        """Return its own level, or what is left of it where ddp beside it makes gradients smaller on their way."""
        left = compression.level(tuning.compress)
        return left if left is Exactness.STATISTICAL else self.exactness

    def prepare(self, inputs: StrategyInputs, world: World) -> Replica:
        """Split the model over tp, and train the parts with the data-parallel strategy of the mesh; tp=1 splits nothing."""
        rows = world.mesh.size("fsdp")
        if world.mesh.size("tp") == 1:
            return (Fsdp() if rows > 1 else Ddp()).prepare(inputs, world)
        _check(inputs, rows)
        world.note_transport()  # inside the layers
        _select_kernels(inputs, world)
        if rows > 1:
            refuse_draws()
        data = world.submesh(*DATA)
        own = Mesh(tuple((side, size) for side, size in world.mesh.sizes if side in DATA))
        group = replace(data, mesh=own)
        split = SplitModel(inputs, world, data)
        part = replace(
            inputs,
            # A model that was whole in the group before is made anew as well; its state comes by `load_local_state`.
            make_model=lambda: split.model,
            make_optimizer=lambda model: split.adopted(inputs.make_optimizer(model)),
            previous=None,
            can_rebuild=False,
            weights_in_sync=True,
            sync_batchnorm=False,
            exactness=Exactness.BITWISE,
        )
        placement: Placement
        reducer: Reducer
        schedule: Schedule
        if rows > 1:
            placement, reducer, schedule = shard(part, group)
            part = replace(part, compile=False)
        else:
            placement = WholePlacement(part, group, equal=group.size > 1, holds_all=False)
            schedule = Schedule() if split.scores is None else SplitScoresSchedule(split.scores)
            reducer = DdpReducer(part, group) if group.size > 1 else Reducer(group)
        return Replica(part, world, SplitPlacement(split, placement), SplitReducer(split, reducer), schedule)


class SplitModel:
    """One worker's part of a model whose layers are split, and what proves that the split is one."""

    def __init__(self, inputs: StrategyInputs, world: World, data: World) -> None:
        """Make the model and split it in place."""
        self.beside, self.rows = world.submesh("tp"), world.submesh("fsdp")
        model, tuning = inputs.make_model().to(world.device), inputs.tuning
        for refuse in (refuse_sparse, refuse_hooks, refuse_references):
            refuse(model, "tp")
        refuse_overlaps(model, held=True)
        if not inputs.weights_in_sync:
            spread_weights(model, world)
        if inputs.sync_batchnorm:
            synchronise(model, data.comm, inputs.shards)
        plan = make_plan(
            model,
            inputs.structure.tensor_plan,
            self.beside.size,
            sequence=tuning.sequence_parallel,
            loss=tuning.loss_parallel,
        )
        self._before: dict[str, nn.Parameter] = {} if inputs.can_rebuild else dict(model.named_parameters())
        self.proofs = proofs_of(model, _unseen(model, plan), inputs.precision.name)
        self._guard = ReadGuard()
        self.cuts = apply_tensor_parallel(model, _mesh(self.beside), plan, self._guard)
        self.split = {name for name, cut in self.cuts.items() if cut.is_split}
        """The parameters of which other workers have other parts."""
        self.region = Region(self.beside.rank, self.beside.size)
        self.region.heads = {getattr(model.get_submodule(name), count) for name, count in plan.heads}
        watch_region(model, plan.opening, plan.closing, self.region)
        for proof in self.proofs:
            proof.watch(model)
        self.scores = None if plan.scores is None else SplitScores(model.get_submodule(plan.scores))
        self.model = model

    def adopted(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer that was made over the whole model, over this worker's part of it."""
        if isinstance(optimizer, Optimizer):
            adopt(optimizer, self.model, self._before, self.cuts)
        return optimizer

    def close(self) -> None:
        """Release the whole model and begin to guard the parts: the optimizer has been given them."""
        self._before.clear()
        refuse_hooks(self.model, "tp")  # which the optimizer's maker may have put there
        if self.rows.size == 1:  # else fsdp has looked, and does so
            self._guard.arm()


class SplitPlacement(Placement):
    """This worker's part of a split model, which is placed among workers with other samples as any model is."""

    ignores_hooks = "tp"
    compares_options = True
    cut_first = True

    def __init__(self, split: SplitModel, inner: Placement) -> None:
        self._split, self._inner = split, inner
        self.model, self.notes = inner.model, inner.notes

    def adopt(self, optimizer: Optimizer) -> None:
        """Take over the optimizer of this part."""
        self._inner.adopt(optimizer)
        self._split.close()
        self._parts = {id(one) for name, one in self.model.named_parameters() if name in self._split.cuts}
        # Where fsdp has rows of the parts, it knows their places.
        self.wired = Places(self.model) if self._inner.whole else self._inner.wired

    def parameters(self) -> list[nn.Parameter]:
        """Return those that train."""
        return self._inner.parameters()

    def leaves(self, step: StepState) -> Leaves:
        """Return the parameters; of those that are split this worker's gradient is a part, which is hidden."""
        shown, hidden = self._inner.leaves(step)
        split = [one for one in shown if id(one) in self._parts]
        return Leaves([one for one in shown if id(one) not in self._parts], [*hidden, *split])

    def synchronize(self) -> None:
        """Refuse to save or report what has parted."""
        self._inner.synchronize()

    def local_state(self) -> LocalState:
        """Return this worker's chunks of the whole model; nobody is asked."""
        return chunks_of_whole(self._inner.local_state(), self._split.cuts)

    def wanted(self, catalogue: Catalogue) -> dict[str, ChunkBounds]:
        """Return the bounds of this worker's part, and all of what the proofs of the plan compare."""
        return {
            **own_bounds(self.local_state().chunks, catalogue),
            **{
                key: ChunkBounds.whole(catalogue[key].shape)
                for proof in self._split.proofs
                for key in proof.tensors
            },
        }

    def load_local_state(self, catalogue: Catalogue, read: Read, extra_state: Mapping[str, Any]) -> None:
        """Load this worker's part of a state."""
        mine, part = part_of_whole(catalogue, read, self._split.cuts)
        self._inner.load_local_state(mine, lambda key, bounds: part(key, bounds).clone(), extra_state)
        for proof in self._split.proofs:
            proof.load(read)

    def abandon(self) -> None:
        """Release the group."""
        self._inner.abandon()


class SplitReducer(AroundReducer):
    """The gradients of split layers, summed as those of any model; the norm is the whole model's."""

    def __init__(self, split: SplitModel, inner: Reducer) -> None:
        super().__init__(inner)
        self.watches, self._split, self._proven = True, split, False

    def wire(self, step: StepState) -> None:
        """Take hold of what trains."""
        super().wire(step)
        self._trained = [name for name, value in step.model.named_parameters() if value.requires_grad]

    def begin(self, work: StepWork) -> None:
        """Start a step, between no split layers."""
        super().begin(work)
        self._split.region.leave()

    def backward(self, loss: Loss) -> None:
        """Add one batch's gradients; the scores stay split up to the loss where that was asked for."""
        with nullcontext() if self._split.scores is None else loss_parallel():
            super().backward(loss)

    def finish(self) -> None:
        """Make `.grad` hold this worker's part of the sums; the first time, compare with the others."""
        super().finish()
        if not self._proven:
            self._proven = True
            whole = [total for _, total in self.step.totals if not isinstance(total, DTensor)]
            if whole:
                check_same_totals(self._split.beside, whole)
            chosen = {name: grad for name, grad in self._gradients() if name not in self._split.split}
            if chosen:
                check_same_gradients(self._split.beside, chosen)

    def _gradients(self) -> list[tuple[str, Tensor | None]]:
        named = zip(self._trained, self.step.parameters, strict=True)
        return [(name, value.grad) for name, value in named]

    def norm(self, held: Sequence[Tensor | None], *, wanted: bool) -> Tensor | None:  # noqa: ARG002
        """Return the norm of the whole gradient: parts are added up over the workers, what each has whole counts once."""
        if not wanted:
            return None
        mine = {name: grad for name, grad in self._gradients() if grad is not None}
        sums = norm_of_parts(mine, self._split.split, self.world.device)
        split, whole = self._split.rows.comm.all_reduce(sums).split(1)
        norm: Tensor = (self._split.beside.comm.all_reduce(split) + whole).sqrt()[0]
        return norm.to(self.step.loss_stats.dtype)


class SplitScoresSchedule(Schedule):
    """The order of one process, with scores that stay split up to the loss."""

    def __init__(self, scores: SplitScores) -> None:
        self._scores = scores

    def train(self, passes: Passes, work: StepWork, loss: LossFunction) -> None:
        """Compute all passes of a step."""
        super().train(passes, work, self._scores.around(loss))


def _check(inputs: StrategyInputs, rows: int) -> None:
    """Refuse what does not go with split layers."""
    if inputs.precision.name == "fp16":
        raise InputError("--strategy tp has no loss scaling for --precision fp16. Use bf16.")
    if inputs.previous is not None and not inputs.previous.whole and not inputs.can_rebuild:
        raise InputError(
            "a split model cannot be made anew in another group of workers, because it was given ready-made. "
            "Give run.prepare functions that make model and optimizer."
        )
    if inputs.tuning.shard_optimizer:
        raise InputError("--shard-optimizer goes with --strategy ddp. Beside tp use fsdp, like fsdp=2,tp=2.")
    if inputs.tuning.loss_parallel and rows > 1:
        raise InputError("--loss-parallel does not work beside fsdp. Use ddp beside tp, or leave it out.")


def _select_kernels(inputs: StrategyInputs, world: World) -> None:
    """Choose deterministic kernels: else copies of the same weights would drift apart."""
    determinism.select_kernels(world.device, compiled=inputs.compile)
    if world.device.type == "cuda":
        # An operation that has no such kernel is no reason to stop here: no bits are promised.
        torch.set_deterministic_debug_mode("warn")


def _mesh(world: World) -> DeviceMesh:
    group = world.comm.group
    if group is None:
        raise RuntimeError("a split among one")
    # Named by generation: torch remembers shapes by mesh, and in the next group this worker may have another rank.
    return DeviceMesh.from_group(group, world.device.type, mesh_dim_names=(f"tp-{world.generation}",))


def _unseen(model: nn.Module, plan: TensorPlan) -> list[str]:
    """Return the regions of which nobody has looked at what stands between their layers."""
    seen = plan.proposed
    return [
        name for name in plan.regions() if not (seen and isinstance(model.get_submodule(name), nn.Sequential))
    ]

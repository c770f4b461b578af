"""Each layer's matrices split among the workers, by torch's `parallelize_module`; data parallel beside it.

Workers beside each other in `tp` compute the same samples, each with its part of the split layers; everything between
those is computed by all of them alike. A worker's part is a model like any other (`tensor_model`), so along the data
sides of the mesh it is trained as any other: by itself, by `ddp` or by `fsdp`, with their sums along the canonical tree.

Level numeric. A product whose sum runs over n terms is a sum of as many partial sums as there are workers, so it differs
from one process's by at most n roundings: n * 2^-23 of the largest term. Masks of dropout are those of one process, and
so is everything else: after k steps weights are within 1e-5 + 5e-6 k of their length (`verify/bounds.py`), as ddp's are
where torch adds in an order of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.state.chunks import (
    MODEL,
    Catalogue,
    ChunkBounds,
    LocalState,
    Read,
    TensorChunk,
    TensorMeta,
    assemble,
    collect,
    split,
    survey,
)
from paceline.strategies import compression
from paceline.strategies.base import Exactness, Leaves, LossFunction, OpenReplica, StepWork, StrategyInputs
from paceline.strategies.batchnorm import synchronise
from paceline.strategies.data_parallel.ddp import DdpReplica
from paceline.strategies.data_parallel.strategy import Ddp
from paceline.strategies.fsdp.replica import FsdpReplica
from paceline.strategies.fsdp.strategy import Fsdp
from paceline.strategies.refusals import refuse_hooks, refuse_references, refuse_sparse
from paceline.strategies.result import StepResult, check_norm
from paceline.strategies.sequential import SequentialReplica
from paceline.strategies.tensor.layers import Region, watch_region
from paceline.strategies.tensor.loss import SplitScores
from paceline.strategies.tensor.model import (
    ReadGuard,
    adopt,
    apply_tensor_parallel,
    norm_of_parts,
    part_of_whole,
    pieces_of_whole,
)
from paceline.strategies.tensor.plan import Plan, make_plan
from paceline.strategies.tensor.proof import check_same_gradients, check_same_totals, proofs_of
from paceline.strategies.trained import check_held
from paceline.strategies.tuning import Tuning
from paceline.strategies.whole_draws import refuse_draws
from paceline.strategies.writes import Writes
from paceline.task import Loss
from paceline.world import World, determinism
from paceline.world.mesh import DATA, Mesh


class TensorParallel:
    """Matrices split among workers that see the same samples."""

    name = "tp"
    exactness = Exactness.NUMERIC
    threaded = False

    def level(self, tuning: Tuning) -> Exactness:
        """Return its own level, or what is left of it where ddp beside it makes gradients smaller on their way."""
        left = compression.level(tuning.compress)
        return left if left is Exactness.STATISTICAL else self.exactness

    def prepare(self, parts: StrategyInputs, world: World) -> OpenReplica:
        """Split the model, and train the parts as the data sides of the mesh say; nothing is split among one."""
        rows = world.mesh.size("fsdp")
        if world.mesh.size("tp") == 1:
            return (Fsdp() if rows > 1 else Ddp()).prepare(parts, world)
        _check(parts, rows)
        world.note_transport()  # inside the layers
        _select_kernels(parts, world)
        if rows > 1:
            refuse_draws()
            return TensorFsdpReplica(parts, world)
        return (TensorReplica if world.mesh.size("ddp") == 1 else TensorDdpReplica)(parts, world)


class TensorReplica(SequentialReplica):
    """One worker's part of a split model, trained by one worker."""

    whole = False
    reads_whole = True  # the proof of its plan compares whole blocks
    _writes: Writes

    def __init__(self, parts: StrategyInputs, world: World) -> None:
        self._all, self._beside, data = world, world.along("tp"), world.along(*DATA)
        self._rows = world.along("fsdp")
        model = self._split(parts, world, data)
        own = Mesh(tuple((side, size) for side, size in world.mesh.sizes if side in DATA))
        super().__init__(
            replace(
                parts,
                # A model that was whole in the group before is made anew as well; its state comes by `take`.
                make_model=lambda: model,
                make_optimizer=lambda model: self._adopted(parts.make_optimizer(model)),
                kept=None,
                remakes=False,
                agreed=True,
                sync_batchnorm=False,
                exactness=Exactness.BITWISE,
            ),
            replace(data, mesh=own),
        )
        self._before.clear()  # the whole model may go
        refuse_hooks(self.model, "tp")  # which the optimizer's maker may have put there
        if self._rows.size == 1:  # else fsdp has looked, and does so
            check_held(self.model, self.optimizer)
            self._guard.arm()
        self._writes = Writes(self.model.named_parameters())
        self._trained = [name for name, value in self.model.named_parameters() if value.requires_grad]
        self._parts_only = {id(value) for name, value in self.model.named_parameters() if name in self._cuts}
        self._max_grad_norm: float | None = None
        self._norm: Tensor | None = None
        self._proven = False

    def _split(self, parts: StrategyInputs, world: World, data: World) -> nn.Module:
        """Make the model and split it in place."""
        model, tuning = parts.make_model().to(world.device), parts.tuning
        for refuse in (refuse_sparse, refuse_hooks, refuse_references):
            refuse(model, "tp")
        if not parts.agreed:
            _agree(model, world)
        if parts.sync_batchnorm:
            synchronise(model, data.comm, parts.shards)
        plan = make_plan(
            model,
            parts.structure.tensor_plan,
            self._beside.size,
            sequence=tuning.sequence_parallel,
            loss=tuning.loss_parallel,
        )
        self._before: dict[str, nn.Parameter] = {} if parts.remakes else dict(model.named_parameters())
        self._proofs = proofs_of(model, _unseen(model, plan), parts.precision.name)
        self._guard = ReadGuard()
        self._cuts = apply_tensor_parallel(model, _mesh(self._beside), plan, self._guard)
        self._region = Region(self._beside.rank, self._beside.size)
        self._region.heads = {getattr(model.get_submodule(name), count) for name, count in plan.heads}
        watch_region(model, plan.opening, plan.closing, self._region)
        for proof in self._proofs:
            proof.watch(model)
        self._scores = None if plan.scores is None else SplitScores(model.get_submodule(plan.scores))
        return model

    def _adopted(self, optimizer: Optimizer) -> Optimizer:
        if isinstance(optimizer, Optimizer):
            adopt(optimizer, self.model, self._before, self._cuts)
        return optimizer

    def leaves(self) -> Leaves:
        """Return the parameters; of those that are split this worker's gradient is a part, which is hidden."""
        shown, hidden = super().leaves()
        split = [one for one in shown if id(one) in self._parts_only]
        return Leaves([one for one in shown if id(one) not in self._parts_only], [*hidden, *split])

    # One step.

    def step(self, work: StepWork, loss: LossFunction, max_grad_norm: float | None) -> StepResult:
        """Compute one optimizer step; the scores stay split up to the loss where that was asked for."""
        return super().step(work, loss if self._scores is None else self._scores.around(loss), max_grad_norm)

    def begin(self, work: StepWork) -> None:
        """Start a step with no gradients, between no split layers."""
        super().begin(work)
        self._writes.begin()
        self._region.leave()

    def backward(self, loss: Loss) -> None:
        """Add one batch's gradients."""
        if self._scores is None:
            super().backward(loss)
        else:
            with self._scores.enabled():
                super().backward(loss)

    def apply(self, max_grad_norm: float | None) -> StepResult:
        """Combine, normalise, clip by the norm of the whole gradient, update."""
        self._max_grad_norm, self._norm = max_grad_norm, None
        result = super().apply(None)
        result.norm = self._norm
        return result

    def _update(self) -> None:
        if self._max_grad_norm is not None:
            self._norm = norm = self._whole_norm()
            if norm.device.type == "cpu" and self.scaler is None:
                check_norm(self._work.number, float(norm))
            # The same guard against division by zero as torch's clip_grad_norm_.
            factor = torch.clamp(self._max_grad_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_([one.grad for one in self.parameters if one.grad is not None], factor)
        super()._update()

    def _whole_norm(self) -> Tensor:
        """Return the norm of the whole gradient: parts are added up over the workers, what each has whole counts once."""
        named = zip(self._trained, self.parameters, strict=True)
        held = {name: value.grad for name, value in named if value.grad is not None}
        split, whole = self._rows.comm.all_reduce(norm_of_parts(held, self._cuts, self.world.device)).split(1)
        norm: Tensor = (self._beside.comm.all_reduce(split) + whole).sqrt()[0]
        return norm

    def _finish_combination(self) -> None:
        self._writes.check(self._work.number)
        super()._finish_combination()
        if not self._proven:
            self._proven = True
            plain = [total for _, total in self.totals if not isinstance(total, DTensor)]
            if plain:
                check_same_totals(self._beside, plain)
            named = zip(self._trained, self.parameters, strict=True)
            chosen = {
                name: value.grad
                for name, value in named
                if name not in self._cuts or not self._cuts[name].is_split
            }
            if chosen:
                check_same_gradients(self._beside, chosen)

    # State.

    def held(self) -> LocalState:
        """Return this worker's pieces of the whole model; nobody is asked."""
        return pieces_of_whole(self._held_here(), self._cuts)

    def take(self, catalogue: Catalogue, read: Read, rest: Mapping[str, Any]) -> None:
        """Take over this worker's part of a state."""
        self._take_here(*part_of_whole(catalogue, read, self._cuts), rest)
        for proof in self._proofs:
            proof.load(read)

    def state(self) -> dict[str, Any]:
        """Return everything whole; all workers must ask together."""
        held = self.held()
        found = survey(self._all, held.pieces)
        return assemble(dict(collect(self._all, held.pieces, found)), held.rest)

    def load(self, state: dict[str, Any]) -> None:
        """Take over this worker's part of a whole state."""
        held = split(state)
        catalogue = {key: piece.form for key, piece in held.pieces.items()}
        self.take(catalogue, lambda key, box: box.of(held.pieces[key].values), held.rest)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that the coming update takes, by name and whole; all workers must ask together."""
        held = self.held().pieces
        pieces = {}
        for name, value in zip(self._trained, self.parameters, strict=True):
            if value.grad is not None:
                known = held[f"{MODEL}/{name}"]
                pieces[name] = TensorChunk(
                    value.grad, known.box, TensorMeta(known.form.shape, value.grad.dtype)
                )
        return dict(collect(self._all, pieces, survey(self._all, pieces)))

    def _held_here(self) -> LocalState:
        """Return what this worker holds of its own part of the model."""
        return split(SequentialReplica.state(self))

    def _take_here(self, catalogue: Catalogue, read: Read, rest: Mapping[str, Any]) -> None:
        """Take over a state of this worker's part."""
        tensors = {key: read(key, ChunkBounds.whole(form.shape)).clone() for key, form in catalogue.items()}
        SequentialReplica.load(self, assemble(tensors, rest))


class TensorDdpReplica(TensorReplica, DdpReplica):
    """The same with workers beside it that have the same part and other samples."""


class TensorFsdpReplica(TensorReplica, FsdpReplica):
    """The same with the part cut up once more, among workers with other samples."""

    def _held_here(self) -> LocalState:
        return FsdpReplica.held(self)

    def _take_here(self, catalogue: Catalogue, read: Read, rest: Mapping[str, Any]) -> None:
        FsdpReplica.take(self, catalogue, read, rest)


def _check(parts: StrategyInputs, rows: int) -> None:
    """Refuse what does not go with split layers."""
    if parts.precision.name == "fp16":
        raise InputError("--strategy tp has no loss scaling for --precision fp16. Use bf16.")
    if parts.kept is not None and not parts.kept.whole and not parts.remakes:
        raise InputError(
            "a split model cannot be made anew in another group of workers, because it was given ready-made. "
            "Give run.prepare functions that make model and optimizer."
        )
    if parts.tuning.shard_optimizer:
        raise InputError("--shard-optimizer goes with --strategy ddp. Beside tp use fsdp, like fsdp=2,tp=2.")
    if parts.tuning.loss_parallel and rows > 1:
        raise InputError("--loss-parallel does not work beside fsdp. Use ddp beside tp, or leave it out.")


def _select_kernels(parts: StrategyInputs, world: World) -> None:
    """Have what every worker computes alike come out alike: else copies of the same weights would drift apart."""
    determinism.select_kernels(world.device, compiled=parts.compile)
    if world.device.type == "cuda":
        # An operation that has no such kernel is no reason to stop here: no bits are promised.
        torch.set_deterministic_debug_mode("warn")


def _mesh(world: World) -> DeviceMesh:
    group = world.comm.group
    if group is None:
        raise RuntimeError("a split among one")
    # Named by generation: torch remembers shapes by mesh, and in the next group this worker may have another rank.
    return DeviceMesh.from_group(group, world.device.type, mesh_dim_names=(f"tp-{world.generation}",))


def _unseen(model: nn.Module, plan: Plan) -> list[str]:
    """Return the regions of which nobody has looked at what stands between their layers."""
    seen = plan.proposed
    return [
        name for name in plan.regions() if not (seen and isinstance(model.get_submodule(name), nn.Sequential))
    ]


def _agree(model: nn.Module, world: World) -> None:
    """Send the first worker's weights to all others."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(world.comm.broadcast(tensor))

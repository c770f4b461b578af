"""One worker's rows of a model: torch's `fully_shard` with the additions of one process.

Gathering weights, freeing them and the moments for it are torch's. Ours is what becomes of gradients (`reduction`),
and that a worker with fewer batches than others follows one that has more through its messages (`rounds`). The optimizer
works on the rows as plain tensors (`sharded`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from paceline.data import owned_shards
from paceline.errors import InputError
from paceline.reduce.combination import Combination
from paceline.reduce.tree import Gradients, TreeSum
from paceline.state.chunks import Catalogue, LocalState, Read, assemble, collect, split, survey
from paceline.state.optimizer_state import plain
from paceline.strategies import gradients
from paceline.strategies.auxiliary import Auxiliary
from paceline.strategies.base import (
    Exactness,
    Leaves,
    LossFunction,
    MetricsFunction,
    Rows,
    ShardWork,
    StepWork,
    StrategyInputs,
)
from paceline.strategies.buffer_snapshot import BufferSnapshot
from paceline.strategies.buffers import Rows as BufferRows
from paceline.strategies.buffers import gather_rows
from paceline.strategies.fsdp.model import make_sharded
from paceline.strategies.fsdp.reach import check_gathered, check_measured, named_reach
from paceline.strategies.fsdp.reduction import Reduction
from paceline.strategies.fsdp.rounds import Schedule
from paceline.strategies.refusals import refuse_hooks
from paceline.strategies.result import StepResult
from paceline.strategies.sequential import SequentialReplica
from paceline.strategies.sharded import ShardedTensors
from paceline.strategies.trained import check_equal, check_held
from paceline.strategies.writes import Writes
from paceline.task import Loss
from paceline.world import World, all_gather_object, seeds
from paceline.world.fault_points import OPTIMIZER, hit


class FsdpReplica(SequentialReplica):
    """A model that is cut up among the workers."""

    whole = False

    def __init__(self, parts: StrategyInputs, world: World) -> None:
        data, self._place = world.along("ddp", "fsdp"), world.along("fsdp")
        self._data = data
        self._exact = parts.exactness is Exactness.BITWISE and parts.tuning.fsdp_dtype == "fp32"
        self._reduction = Reduction(
            data, self._place, world.along("ddp"), parts.shards, exact=self._exact, transport=parts.transport
        )
        made = make_sharded(parts, data, self._place, self._reduction)
        super().__init__(replace(parts, make_model=lambda: made.model, kept=None, compile=False), world)
        refuse_hooks(self.model, "fsdp")  # which the optimizer's maker may have put there
        self.notes: list[str] = made.notes
        """What a user should know of how the model was made."""
        self.local = ShardedTensors(self.model)
        self.local.rewire(self.optimizer, made.originals)
        check_held(cast(nn.Module, self.local), self.optimizer)
        self.trained.renew()
        order = {id(value): place for place, value in enumerate(self.parameters)}
        named = [(name, value) for name, value in self.local.named_parameters() if value.requires_grad]
        self._names, self.parameters = [name for name, _ in named], [value for _, value in named]
        self.tracked = [*self.parameters, self.ledger]
        self.auxiliary = Auxiliary(self.parameters)
        self._terms: Auxiliary | None = None
        places = [[order[id(cut.parameter)] for cut in wrap.cuts] for wrap in made.wraps]
        self._reduction.attach(made.wraps, places, self.parameters)
        for wrap in made.wraps:
            wrap.watch(self.local)
        self._find_unused_parameters = parts.find_unused_parameters
        self._owned = owned_shards(data.rank, data.size, parts.shards, world.shares)
        self._schedule = Schedule(data)
        self._used = [False] * len(self.parameters)
        self._writes = Writes(self.model.named_parameters())

    def _on_device(self, model: nn.Module) -> nn.Module:
        return model  # it is in its place since it was made, which for rows may be host memory

    # One step, in rounds that all workers go through together.

    def step(self, work: StepWork, loss: LossFunction, max_grad_norm: float | None) -> StepResult:
        """Compute one optimizer step; a loss that reaches for weights that are not gathered is refused."""
        return super().step(work, named_reach(loss, self._reduction.blocks), max_grad_norm)

    def shard(self, work: ShardWork) -> Iterator[Any]:
        """Return the batches of one shard, with what belongs to no block gathered for each."""
        for batch in super().shard(work):
            self._reduction.open_root()
            yield batch

    def begin(self, work: StepWork) -> None:
        """Start a step, and learn how many rounds it takes."""
        super().begin(work)
        for leaf in (*self.trained.parameters, *self.leaves().shown):
            leaf.grad = None  # of a pass that the loop made for itself
        self._writes.begin()
        self._reduction.begin(self._schedule.rounds(work), looks=self._writes.looks)
        self._used = [False] * len(self.parameters)
        if self._terms is not None:
            self._terms.take()

    def backward(self, loss: Loss) -> None:
        """Add one batch's gradients; the last pass of the step takes them to the workers that hold the rows."""
        self._enter(loss)
        check_gathered(loss, self._reduction.blocks)
        if loss.auxiliary:
            self._backward_of_terms(loss)
        self._reduction.arm(self._combination(self._open))
        gradients.run_backward(
            [loss.total, self.ledger],
            [self._scale(loss.total.dtype), gradients.ledger_entry(loss, self._work.size)],
        )
        self._reduction.settle()
        if self._reduction.ends:
            self._note_use()
        self._reduction.end_pass()

    def _backward_of_terms(self, loss: Loss) -> None:
        """Keep the whole gradients of the auxiliary terms; they leave at the end of the step."""
        if self._terms is None:
            whole = [cut.gathered for cut in self._reduction.cuts]
            self._terms = Auxiliary([one for one in whole if one is not None])
            self._terms.names, self._terms.settled = self.auxiliary.names, self.auxiliary.settled
            if None in whole:
                self._refuse([name for name, one in zip(self._names, whole, strict=True) if one is None])
        for name, term in loss.auxiliary.items():
            if not term.total.requires_grad:
                raise InputError(
                    f"the auxiliary term {name} depends on nothing that is trained in this batch, and other workers would wait "
                    "for the weights of its backward pass. Let it go through the model: Loss(0 * outputs.sum(), 0)."
                )
        for wrap in self._reduction.wraps:
            wrap.arm(reduces=False, keeps=wrap.name == "")
        self._terms.backward(loss.auxiliary, self._scale, self._work.size)
        self.auxiliary.names = self._terms.names

    def _combination(self, last: int | None) -> Combination | None:
        """Return what this worker's sums are made of, in the pass that ends an exact step."""
        if not (self._exact and self._reduction.ends):
            return None
        return Combination(self._tree, last, self._owned, self._shards)

    def _note_use(self) -> None:
        """Remember which parameters had a gradient, and refuse a missing one that nobody announced."""
        unused: list[str] = []
        for wrap, places in zip(self._reduction.wraps, self._reduction.places, strict=True):
            for place, cut in zip(places, wrap.cuts, strict=True):
                used = wrap.reduced and not any(cut is one for one in wrap.missing)
                self._used[place] |= used
                unused += [] if used else [self._names[place]]
        if unused and not self._find_unused_parameters:
            reached = self._reached_by_terms()
            self._refuse([name for name in unused if name not in reached])

    def _reached_by_terms(self) -> set[str]:
        """Return the parameters that an auxiliary term of this step has a gradient for."""
        if self._terms is None:
            return set()
        rows = self._terms.reached()
        for _, held in self._tree.nodes:
            rows += self._terms.reached(held[len(self.tracked) :])
        return {name for row in rows for name, there in zip(self._names, row, strict=True) if there}

    def _refuse(self, unused: list[str]) -> None:
        if not unused:
            return
        raise InputError(
            f"no gradient for {', '.join(unused[:5])} on rank {self.world.rank}: this step's loss does not depend on it. "
            "If that is meant, set find_unused_parameters = True in the task, or give it to paceline.launch."
        )

    def _take(self) -> Gradients:
        """Return what a finished shard left in this worker's memory, auxiliary gradients behind the main ones."""
        whole = [cut.gathered for cut in self._reduction.cuts]
        taken: Gradients = [None if one is None else one.grad for one in whole]
        taken.append(self.ledger.grad)
        for parameter in (*whole, self.ledger):
            if parameter is not None:
                parameter.grad = None
        return taken + ([] if self._terms is None else self._terms.take())

    def _finish_combination(self) -> None:
        """Follow the others through the rounds that are left; then bring the small sums together."""
        if self._left:
            raise InputError(
                f"step {self._work.number}: backward was not called for {self._left} of this worker's batches. All workers go "
                "through a sharded model together, so call it for each; a weight of 0 leaves a batch out."
            )
        while not self._reduction.over:
            self._reduction.follow(self._combination(None))
        if not self.auxiliary.settled:
            self._agree_on_terms()
        present = self._drop_unused() if self._find_unused_parameters else None
        self._combine_small()
        stride = len(self.parameters) + 1
        flat: Gradients = []
        for number, _ in enumerate(self.auxiliary.names):
            rows: Gradients = [*self._reduction.scatter_terms(self._tree, stride * (number + 1))]
            if present is not None:  # what nobody has a gradient for stays without one
                rows = [one if there else None for one, there in zip(rows, present[number], strict=True)]
            flat += [*rows, self._entries[number]]
        self.auxiliary.give(flat)
        self._tree = TreeSum(self._shards)  # whole gradients that have left need no memory any more

    def _drop_unused(self) -> list[list[bool]]:
        """Return no gradient to parameters that nobody had one for: they stay as they are, weight decay and all.

        Return the same of each auxiliary term.
        """
        count = len(self.parameters)
        mine = torch.zeros(1 + len(self.auxiliary.names), count, dtype=torch.int32)
        mine[0] = torch.tensor(self._used, dtype=torch.int32)
        for _, held in self._tree.nodes:
            rows = [[one is not None for one in held[:count]], *self.auxiliary.reached(held[count + 1 :])]
            mine |= torch.tensor(rows, dtype=torch.int32)
        found: list[list[bool]] = self._data.comm.all_reduce(mine, "max").bool().tolist()
        used, *terms = found
        for parameter, there in zip(self.parameters, used, strict=True):
            if not there:
                parameter.grad = None
        return terms

    def _agree_on_terms(self) -> None:
        """Ask once, in the first step: a worker without a sample has seen no auxiliary term yet."""
        names = max(all_gather_object(self._data.comm, self.auxiliary.names), key=len)
        for one in (self.auxiliary, self._terms):
            if one is not None:
                one.names, one.settled = names, True

    def _combine_small(self) -> None:
        """Add up the ledger and the auxiliary terms' own: two numbers each."""
        stride = len(self.parameters) + 1
        nothing = torch.full((2,), -0.0, device=self.world.device)
        ends = range(stride - 1, stride * (len(self.auxiliary.names) + 1), stride)
        sums = []
        for _, held in self._tree.nodes:
            entries = [held[end] if end < len(held) else None for end in ends]
            sums.append(torch.cat([nothing if entry is None else entry for entry in entries]))
        total = self._reduction.scatter.add_small(sums).view(-1, 2)
        self.ledger.grad, self._entries = total[0].clone(), list(total[1:].clone())

    def _agree_on_buffers(self, names: list[str]) -> list[str]:
        every = {name for part in all_gather_object(self._data.comm, names) for name in part}
        return [name for name, _ in self.model.named_buffers() if name in every]

    def _gather_buffers(self, rows: BufferRows) -> BufferRows:
        return gather_rows(rows, self.buffers.like(), self._data, self._shards)

    def combine(self) -> None:
        """Do nothing: the sums are rows that the model's own parameters never show."""

    def leaves(self) -> Leaves:
        """Return the whole parameters of passes; the rows of them that the model and the optimizer hold are hidden."""
        whole = [one.gathered for one in self._reduction.cuts if one.gathered is not None]
        return Leaves(whole, [*self.trained.parameters, *self.parameters])

    def apply(self, max_grad_norm: float | None) -> StepResult:
        """Combine, normalise, clip by the norm of the whole gradient, update the rows."""
        self._check_unchanged()
        self._writes.check(self._work.number)
        self._reduction.check_passes(f"step {self._work.number}")
        self._finish_combination()
        entry = self.ledger.grad
        if entry is None:
            raise RuntimeError("the ledger has no sum")
        result = StepResult(self._work.number, self._work.size, entry, self.auxiliary.entries())
        result.scaled = self.scaler is not None
        if entry.device.type == "cpu":
            result.check()
        self.buffers.combine(self._agree_on_buffers, self._gather_buffers)
        factor = result.factor
        if self.auxiliary.names:
            self.auxiliary.merge(self._work.size, factor)
            factor = 1.0
        self._unscale()
        if max_grad_norm is not None:
            result.norm = norm = self._reduction.norm() * factor
            if entry.device.type == "cpu":
                result.check_norm()
            factor = factor * torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0)
        held = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        gradients.finish(held, factor, None)
        hit(OPTIMIZER)
        self._update()
        self.buffers.settle()
        return result

    def _unscale(self) -> None:
        """Undo the scale of fp16 gradients; an overflow in anybody's rows is everybody's."""
        if self.scaler is None:
            return
        self.scaler.unscale_(self.optimizer)
        for found in self.scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"].values():  # noqa: SLF001
            self._place.comm.all_reduce_(found, "max").wait()

    def abandon(self) -> None:
        """Let go of shared memory at once: the wraps are a circle with the model, which may stay for long."""
        super().abandon()
        self._reduction.abandon()

    # Evaluation and state.

    def evaluate(self, works: Iterable[StepWork], metrics: MetricsFunction) -> Rows:
        """Measure this worker's shards, and follow the others through theirs."""
        rows: Rows = {}
        metrics = named_reach(metrics, self._reduction.blocks)
        modes = [(module, module.training) for module in self.model.modules()]
        buffers = BufferSnapshot(module for module, _ in modes)
        self.model.eval()
        try:
            with torch.no_grad(), seeds.preserved():
                for work in works:
                    self._reduction.begin(self._schedule.rounds(work))
                    for shard in work.shards:
                        seeds.seed_everything(shard.seed)
                        for part, batch in enumerate(shard.batches):
                            self.world.pulse.batch()
                            self._reduction.open_root()
                            with self.precision.autocast():
                                measured = metrics(self.model, self._placed(batch))
                            check_measured(measured, self._reduction.blocks)
                            rows[work.number, shard.index, part] = measured
                            buffers.restore_moved()
                            self._reduction.end_forward()
                    while not self._reduction.over:
                        self._reduction.follow(None)
            self._reduction.check_passes("evaluation")
        finally:
            buffers.restore()
            for module, mode in modes:
                module.training = mode
        return rows

    def settle(self) -> None:
        """Refuse to save or report buffers in which the workers have parted; of weights each has its own rows."""
        if self._exact:
            check_equal(self.model.named_buffers(), self._data)

    def held(self) -> LocalState:
        """Return this worker's rows; nobody is asked."""
        self._reduction.check_slots()
        return self.local.held(
            self.optimizer,
            {
                "scheduler": None if self.scheduler is None else plain(self.scheduler.state_dict()),
                "scaler": None if self.scaler is None else plain(self.scaler.state_dict()),
            },
        )

    def take(self, catalogue: Catalogue, read: Read, rest: Mapping[str, Any]) -> None:
        """Take over this worker's rows of a state."""
        self.local.take(self.optimizer, catalogue, read, rest["optimizer"])
        if self.scheduler is not None and rest["scheduler"] is not None:
            self.scheduler.load_state_dict(rest["scheduler"])
        if self.scaler is not None and rest["scaler"] is not None:
            self.scaler.load_state_dict(rest["scaler"])

    def state(self) -> dict[str, Any]:
        """Return everything whole; all workers must ask together."""
        held = self.held()
        return assemble(dict(collect(self.world, held.pieces, survey(self.world, held.pieces))), held.rest)

    def load(self, state: dict[str, Any]) -> None:
        """Take over a whole state, of this or another strategy."""
        held = split(state)
        forms = {key: piece.form for key, piece in held.pieces.items()}
        self.take(forms, lambda key, box: box.of(held.pieces[key].values), held.rest)

"""A replica that computes its shards one after the other: all of `single`, and each worker's part of `ddp`.

The ledger is a parameter of two numbers that rides along: its gradient is the sum of the losses and the sum of
the weights. Whatever combines the gradients combines it too, so the exact loss and the exact weight of the
global batch cost no message of their own. Gradients are scaled beforehand by the number of samples, which
everyone knows; only where the true weight turns out to be another one (tokens, say) are they corrected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data import to_device
from paceline.errors import InputError
from paceline.reduce.tree import Gradients, TreeSum, add
from paceline.reduction import is_mean
from paceline.state.chunks import Catalogue, ChunkBounds, LocalState, Read, assemble, split
from paceline.state.optimizer_state import check_own_entries, load_optimizer_state, optimizer_state, plain
from paceline.strategies import gradients, sparse
from paceline.strategies.auxiliary import Auxiliary
from paceline.strategies.base import (
    Leaves,
    LossFunction,
    MetricsFunction,
    Rows,
    ShardWork,
    StepWork,
    StrategyInputs,
)
from paceline.strategies.buffer_snapshot import BufferSnapshot
from paceline.strategies.buffers import Buffers
from paceline.strategies.buffers import Rows as BufferRows
from paceline.strategies.partial_update import PartialUpdate, Scope
from paceline.strategies.recompute import check_passes, recompute_blocks
from paceline.strategies.result import StepResult
from paceline.strategies.trained import Trained, agree_on_change, check_held
from paceline.strategies.unsaved import moved_unsaved, note_unsaved, put_unsaved
from paceline.task import Loss
from paceline.world import World, seeds
from paceline.world.fault_points import BACKWARD, FORWARD, OPTIMIZER, hit


class SequentialReplica:
    """One model on one device; several shards are summed along the canonical tree."""

    whole = True
    reads_whole = False
    adapts = True
    """Whether it goes on where other parameters begin to train; a subclass that does says so itself."""

    holds_unsaved = True
    """Whether its state has the buffers that `state_dict` leaves out, where they change; a subclass says so itself."""

    def __init_subclass__(cls) -> None:
        """Have a strategy refuse what it does not say that it can do."""
        cls.adapts = vars(cls).get("adapts", False)
        cls.holds_unsaved = vars(cls).get("holds_unsaved", False)

    def __init__(self, parts: StrategyInputs, world: World) -> None:
        self.world = world
        self.model = self._on_device(parts.model)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        check_trainable(self.parameters)
        self._recompute = parts.tuning.activation_checkpointing
        recompute_blocks(self.model, parts.structure, parts.tuning)
        if parts.compile and not parts.carries_on:
            self.model.compile()  # in place: the module keeps its type and its names
        self.optimizer = parts.optimizer(self.model)
        check_own_entries(self.optimizer, kept=self.adapts)
        self.partial_update = PartialUpdate(self.optimizer, self._scope(parts, world), world.device)
        self.scheduler = parts.scheduler(self.optimizer)
        self.precision = parts.precision
        self.scaler = parts.scaler or parts.precision.scaler()
        self.ledger = nn.Parameter(torch.zeros(2, device=world.device))
        self.tracked = [*self.parameters, self.ledger]
        self.auxiliary = Auxiliary(self.parameters)
        if self.adapts:
            check_held(self.model, self.optimizer)
        self.trained = Trained(self.model, self.optimizer)
        """What was wired up; a subclass that gives the optimizer other tensors afterwards renews it."""
        self._buffer_rules = parts.buffer_rules
        self.buffers = Buffers(self.model, parts.buffer_rules, parts.shards)
        self.buffers.refuses_unsaved = not self.holds_unsaved
        if self.holds_unsaved:
            note_unsaved(self.model)
        self.totals: list[tuple[int, Tensor]] = []
        """The loss of each batch of this step with its shard, to find where a bad one came from."""
        self.sparse = sparse.sparse_parameters(self.model)
        """Those whose gradients are a few rows."""
        self._adding = sparse.add if self.sparse else add
        self._shards = parts.shards
        self._tree = TreeSum(parts.shards, self._adding)
        self._work = StepWork(0, 0, ())
        self._open = 0
        self._left = 0
        self._sent = False
        self._is_summed = False
        self._seeds: dict[tuple[int, torch.dtype], Tensor] = {}

    # One step, as the loop of a Task takes it.

    def step(self, work: StepWork, loss: LossFunction, max_grad_norm: float | None) -> StepResult:
        """Compute one optimizer step over one exact global batch."""
        self.begin(work)
        for shard in work.shards:
            for batch in self.shard(shard):
                with self.precision.autocast():
                    value = loss(self.model, batch)
                self.backward(value)
        return self.apply(max_grad_norm)

    # The same step piece by piece, for a loop of the user's own.

    def begin(self, work: StepWork) -> None:
        """Start a step with no gradients, wired up for what trains now."""
        self._work = work
        self.partial_update.check()
        self._follow()
        self._left = sum(len(shard.batches) for shard in work.shards)
        self._sent = self._is_summed = False
        self._tree = TreeSum(self._shards, self._adding)
        self.auxiliary.take()
        self.buffers.begin()
        self.totals = []
        for parameter in self.tracked:
            parameter.grad = None

    def shard(self, work: ShardWork) -> Iterator[Any]:
        """Return the batches of one shard, on the device, with its random streams set."""
        self._open = work.index
        if work.batches:
            versions = self.buffers.open_shard(self.model)
            seeds.seed_everything(work.seed)
            for batch in work.batches:
                hit(FORWARD)
                self.world.pulse.batch()
                yield self._placed(batch)
            self.buffers.close_shard(work.index, self.model, versions)
        self._close_shard(work)

    def backward(self, loss: Loss) -> None:
        """Add one batch's gradients; the last one of the step sets off the combination with other workers."""
        self._enter(loss)
        if loss.auxiliary:
            self.auxiliary.backward(loss.auxiliary, self._scale, self._work.size)
        roots = [loss.total, self.ledger]
        self._sent = self._left == 0 and self._reduces_now()
        if self._sent:
            self._arm(roots, self._open)
        starts = [self._scale(loss.total.dtype), gradients.ledger_entry(loss, self._work.size)]
        gradients.run_backward(roots, starts)
        if self._sent:
            self._combined()

    def _enter(self, loss: Loss) -> None:
        """Take note of a loss whose backward pass comes next, or refuse it."""
        check_loss(loss)
        hit(BACKWARD)
        if self._left == 0:
            raise InputError(
                f"step {self._work.number}: backward was called more often than batches were given. Call it once for each batch, "
                "with the sum of what belongs together; to take a batch in smaller pieces say micro_batch= (--micro-batch)."
            )
        self._left -= 1
        self.totals += [(self._open, part.total.detach()) for part in (loss, *loss.auxiliary.values())]
        if loss.auxiliary:
            check_passes(self._recompute)
            sparse.check_terms(self.sparse)

    def combine(self) -> None:
        """Make `.grad` hold the sum over the whole global batch, once a step."""
        if not self._is_summed:
            self._is_summed = True
            self._finish_combination()

    def leaves(self) -> Leaves:
        """Return the model's parameters."""
        return Leaves(self.trained.parameters)

    def apply(self, max_grad_norm: float | None) -> StepResult:
        """Combine, normalise, clip, update."""
        self.combine()
        entry = self.ledger.grad
        if entry is None:
            raise InputError(
                f"step {self._work.number}: step.backward was never called, so there is nothing to apply."
            )
        result = self._result(entry)
        result.scaled = self.scaler is not None
        if entry.device.type == "cpu":
            result.check()  # elsewhere the loop asks one step later, so that no GPU waits for the question
        self.buffers.combine(self._agree_on_buffers, self._gather_buffers)
        factor = self._factor(result)
        if self.auxiliary.names:
            self.auxiliary.merge(self._work.size, factor)
            factor = 1.0
        self._check_unchanged()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        held = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        result.norm = self._normalise(held, factor, max_grad_norm)
        if entry.device.type == "cpu":
            self._check_norm(result)
        hit(OPTIMIZER)
        self._update()
        self.buffers.settle()
        return result

    def abandon(self) -> None:
        """Forget the step under way: weights change only once every sum has arrived, buffers are put back."""
        self.buffers.put_back()
        self._tree = TreeSum(self._shards, self._adding)
        for parameter in self.tracked:
            parameter.grad = None

    # What trains may change between two steps.

    def _follow(self) -> None:
        """Take up what has begun or ceased to train since the last step, or refuse to go on without it."""
        self.trained.check_hooks()
        if not self.trained.changed:
            return
        if not self.adapts:
            self.trained.check("this strategy")
        agree_on_change(self.world, self._work.number, self.trained)
        check_held(self.model, self.optimizer)
        for parameter in self.model.parameters():
            parameter.grad = None  # of the step before: nobody else takes it from what has ceased to train
        self._rewire()
        self.trained.renew()

    def _rewire(self) -> None:
        """Train what requires gradients now."""
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        check_trainable(self.parameters)
        self.tracked = [*self.parameters, self.ledger]
        self.auxiliary = self.auxiliary.over(self.parameters)
        self.sparse = sparse.sparse_parameters(self.model)
        self._adding = sparse.add if self.sparse else add
        self.buffers = Buffers(self.model, self._buffer_rules, self._shards)
        self.buffers.refuses_unsaved = not self.holds_unsaved

    # What a strategy of several workers does otherwise.

    def _scope(self, parts: StrategyInputs, world: World) -> Scope:  # noqa: ARG002
        """Return how much of the model this worker's optimizer updates in one step."""
        return Scope.ALL if self.whole else Scope.ROWS

    def _on_device(self, model: nn.Module) -> nn.Module:
        """Return the model with its values where they are computed with."""
        return model.to(self.world.device)

    def _reduces_now(self) -> bool:
        """Return whether the coming backward pass, the last one of the step, takes the gradients along to other workers."""
        return True

    def _arm(self, roots: list[Tensor], last: int | None) -> None:
        """Prepare for the backward pass that ends the step; `last` is the shard it belongs to."""

    def _combined(self) -> None:
        """React to the end of that pass."""

    def _close_shard(self, work: ShardWork) -> None:
        """Put a finished shard's gradients into the tree."""
        self._tree.add((work.index, work.index + 1), self._take())

    def _finish_combination(self) -> None:
        """Make `.grad` hold the sum over the whole global batch."""
        if self._tree.nodes:
            self._give(self._tree.nodes[0][1])
        for parameter in self.sparse:
            if parameter.grad is not None:
                parameter.grad = sparse.coalesced(parameter.grad)

    def _result(self, entry: Tensor) -> StepResult:
        """Return what the step came to, from the combined ledger."""
        return StepResult(self._work.number, self._work.size, entry, self.auxiliary.entries())

    def _factor(self, result: StepResult) -> Tensor | float:
        """Return what the gradients, which are over the number of samples, are to be multiplied by."""
        return result.factor

    def _normalise(
        self, held: list[Tensor], factor: Tensor | float, max_grad_norm: float | None
    ) -> Tensor | None:
        """Turn summed gradients into those of the optimizer, and give their norm if they are clipped."""
        if not held:
            return None
        return (
            sparse.finish(held, factor, max_grad_norm)
            if self.sparse
            else gradients.finish(held, factor, max_grad_norm)
        )

    def _check_norm(self, result: StepResult) -> None:
        """Raise, on all workers alike, where the norm of the gradient is no number; it is the same on all of them."""
        result.check_norm()

    def _agree_on_buffers(self, names: list[str]) -> list[str]:
        """Return the buffers that change on any worker, in the model's order."""
        return names

    def _gather_buffers(self, rows: BufferRows) -> BufferRows:
        """Return the rows of all workers' shards."""
        return rows

    # Small parts.

    def _check_unchanged(self) -> None:
        """Refuse what changed since the step began: some of its gradients were never summed."""
        if self.trained.changed:
            raise InputError(
                f"step {self._work.number}: {self.trained.words()} in the middle of a step, when some of its gradients had been "
                "made. Change what trains between two steps: before `for batch in step`."
            )

    def _take(self) -> Gradients:
        """Return the gradients gathered since the last call, auxiliary ones behind the main ones."""
        taken: Gradients = [parameter.grad for parameter in self.tracked]
        for parameter in self.tracked:
            parameter.grad = None
        return taken + self.auxiliary.take()

    def _give(self, summed: Gradients) -> None:
        for parameter, gradient in zip(self.tracked, summed, strict=False):
            parameter.grad = gradient
        self.auxiliary.give(summed[len(self.tracked) :])

    def _placed(self, batch: Any) -> Any:
        """Return a batch on the device; from pinned memory the copy does not keep this process waiting."""
        return to_device(batch, self.world.device, non_blocking=self.world.device.type == "cuda")

    def _scale(self, dtype: torch.dtype) -> Tensor:
        """Return the gradient that the backward pass starts from: one over the samples of the global batch."""
        key = (self._work.size, dtype)
        if key not in self._seeds:
            self._seeds[key] = torch.tensor(1.0 / self._work.size, dtype=dtype, device=self.world.device)
        scale = self._seeds[key]
        return scale if self.scaler is None else self.scaler.scale(scale)

    def _update(self) -> None:
        self.partial_update.check()
        if self.scaler is None:
            self.optimizer.step()
        else:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scaler.get_scale() < before:
                return  # the gradients overflowed: no update was made, so the schedule waits too
        if self.scheduler is not None:
            self.scheduler.step()

    # Evaluation and state.

    def evaluate(self, works: Iterable[StepWork], metrics: MetricsFunction) -> Rows:
        """Measure this worker's shards without touching gradients, buffers or random streams."""
        rows: Rows = {}
        modes = [(module, module.training) for module in self.model.modules()]
        buffers = BufferSnapshot(module for module, _ in modes)
        self.model.eval()
        try:
            with torch.no_grad(), seeds.preserved():
                for work in works:
                    for shard in work.shards:
                        seeds.seed_everything(shard.seed)
                        for part, batch in enumerate(shard.batches):
                            self.world.pulse.batch()
                            with self.precision.autocast():
                                rows[work.number, shard.index, part] = metrics(
                                    self.model, self._placed(batch)
                                )
                            buffers.restore_moved()
        finally:
            buffers.restore()
            for module, mode in modes:
                module.training = mode  # a layer that the user froze stays frozen
        return rows

    def settle(self) -> None:
        """Bring all workers to one state, where they have gone their own ways: before a checkpoint, all together."""

    def state(self) -> dict[str, Any]:
        """Return everything by name, independent of the strategy."""
        moved = moved_unsaved(self.model)
        return {
            **({"buffers": moved} if moved else {}),
            "model": self.model.state_dict(),
            "optimizer": plain(optimizer_state(self.model, self.optimizer)),
            "scheduler": None if self.scheduler is None else plain(self.scheduler.state_dict()),
            "scaler": None if self.scaler is None else plain(self.scaler.state_dict()),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state, of this or another strategy."""
        known = self.model.state_dict()
        made_later = [name for name in state["model"] if name not in known]
        if made_later:
            raise InputError(
                f"{made_later[0]} was put into the model while the run went on, and this worker, which has come later, was not "
                "given it. Have all parts in the model before run.prepare, frozen at first: no worker can be replaced else."
            )
        self.model.load_state_dict(state["model"])
        put_unsaved(self.model, state.get("buffers", {}))
        load_optimizer_state(self.model, self.optimizer, state["optimizer"], grows=self.adapts)
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])

    def held(self) -> LocalState:
        """Return everything: this worker holds it all."""
        return split(self.state())

    def take(self, catalogue: Catalogue, read: Read, rest: Mapping[str, Any]) -> None:
        """Take over the whole of a state."""
        whole = {key: read(key, ChunkBounds.whole(form.shape)) for key, form in catalogue.items()}
        self.load(assemble(whole, rest))


def check_trainable(parameters: Sized) -> None:
    """Refuse a model that cannot learn; `parameters` are those that are trained."""
    if not len(parameters):
        raise InputError(
            "the model has no trainable parameters: nothing would be learned. Set requires_grad on some."
        )


def check_loss(loss: object) -> None:
    """Refuse what is not a `Loss`, and say how to make one."""
    if not isinstance(loss, Loss):
        raise InputError(
            f"loss() returned a {type(loss).__name__}, not a paceline.Loss. Return paceline.Loss.mean(per_item_losses), "
            "with reduction='none', or paceline.Loss(total, weight)."
        )
    if not isinstance(loss.total, Tensor):
        raise InputError(
            f"Loss.total is a {type(loss.total).__name__}, not a tensor, so it has no gradient. Give the sum, without .item()."
        )
    if loss.total.dim() != 0:
        raise InputError(
            f"Loss.total has the shape {tuple(loss.total.shape)}; it must be one number, a sum. Use Loss.mean."
        )
    if is_mean(loss.total, loss.weight):
        raise InputError(
            "this loss is a mean where its sum belongs, so gradients would be too small by the weight. Give Loss.mean(per_item) "
            "with reduction='none', a sum (reduction='sum') with its weight, or Loss.from_mean(loss, weight); where the sum is "
            "divided by a constant that happens to equal the weight, multiply by its inverse (* 0.25 for / 4)."
        )
    _check_nothing("this loss", loss)
    for name, term in loss.auxiliary.items():
        _check_nothing(f"the auxiliary term {name}", term)
        # With the weight 1 a batch is one item of it, as for a balance loss.
        once = not isinstance(term.weight, Tensor) and term.weight == 1
        if not once and isinstance(term.total, Tensor) and is_mean(term.total, term.weight):
            raise InputError(
                f"the auxiliary term {name} is a mean where its sum belongs. Give Loss.from_mean(term, weight), or the weight 1 "
                "to count it once for each batch."
            )


def _check_nothing(what: str, loss: Loss) -> None:
    """Refuse a batch of no weight whose sum is no number, as far as that is known without waiting for a device."""
    total, weight = loss.total, loss.weight
    if not isinstance(total, Tensor) or total.device.type != "cpu" or weight or math.isfinite(total.item()):
        return
    raise InputError(
        f"{what} has the weight 0, for nothing in the batch counts, and its total is {total.item()}, where a sum over nothing "
        "is 0: a mean was taken over nothing. Give the sum (reduction='sum'), or Loss.from_mean(loss, weight)."
    )

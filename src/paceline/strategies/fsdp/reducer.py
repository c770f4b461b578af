"""What one worker of a sharded model does with gradients: torch's `fully_shard` with the additions of one process.

Gathering weights, freeing them and the moments for it are torch's. Ours is what becomes of gradients (`reduction`),
and that a worker with fewer batches than others follows one that has more through its messages (`rounds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.compat import optim
from paceline.compat.autograd import run_backward
from paceline.data import owned_shards
from paceline.errors import InputError
from paceline.reduce.combination import Combination
from paceline.reduce.tree import Gradients
from paceline.strategies.auxiliary import Auxiliary
from paceline.strategies.base import (
    Exactness,
    LossFunction,
    MetricsFunction,
    Rows,
    StepWork,
    StrategyInputs,
)
from paceline.strategies.fsdp.placement import RowsPlacement
from paceline.strategies.fsdp.reach import check_gathered, check_measured, named_reach
from paceline.strategies.fsdp.reduction import FsdpReduction
from paceline.strategies.fsdp.rounds import KnownRounds
from paceline.strategies.reducer import Reducer, agree_on_terms
from paceline.strategies.schedule import Passes, Schedule
from paceline.task import Loss
from paceline.world import World


class FsdpReducer(Reducer):
    """The gradients of a model that is sharded among the workers."""

    watches = True
    shows_sums = False
    narrows = False

    def __init__(
        self,
        inputs: StrategyInputs,
        data: World,
        place: World,
        placement: RowsPlacement,
        reduction: FsdpReduction,
    ) -> None:
        super().__init__(data)
        self._place = place
        self._placement, self._reduction = placement, reduction
        self._exact = is_exact(inputs)
        self._find_unused_parameters = inputs.find_unused_parameters
        self._owned = owned_shards(data.rank, data.size, inputs.shards, data.shares)
        self.rounds = KnownRounds(self.world)
        self._terms: Auxiliary | None = None
        """The auxiliary terms over whole parameters; those of the step are over rows."""
        self._used: list[bool] = []
        self._entries: list[Tensor] = []

    def begin(self, work: StepWork) -> None:
        """Start a step, and learn how many rounds it takes."""
        for leaf in (*self.step.trained.parameters, *self._placement.gathered_leaves()):
            leaf.grad = None  # of a pass that the loop made for itself
        looks = self.step.writes is not None and self.step.writes.looks
        self._reduction.enter()
        self._reduction.begin(self.rounds.rounds(work), looks=looks)
        self._used = [False] * len(self.step.parameters)
        if self._terms is not None:
            self._terms.take()

    def backward(self, loss: Loss) -> None:
        """Add one batch's gradients; the last pass of the step takes them to the workers that hold the rows."""
        check_gathered(loss, self._reduction.blocks)
        self._reduction.end_round()  # a loop may have kept the loss of an earlier batch
        try:
            self._backward(loss)
        finally:
            self._reduction.disarm()

    def _backward(self, loss: Loss) -> None:
        step, ends = self.step, self._reduction.ends
        if loss.auxiliary:
            self._backward_of_terms(loss)
        self._reduction.arm(self._combination(step.open) if ends else None, reduces=ends)
        run_backward((loss.total, step.loss_stats), step.starts(loss))
        self._reduction.finish_reductions()
        if ends:
            self._note_use()
        self._reduction.end_pass()

    def _backward_of_terms(self, loss: Loss) -> None:
        """Keep the whole gradients of the auxiliary terms; they leave at the end of the step."""
        step = self.step
        if self._terms is None:
            whole = [member.gathered for member in self._reduction.trained]
            self._terms = Auxiliary([one for one in whole if one is not None], step.auxiliary.kind)
            self._terms.names, self._terms.agreed = step.auxiliary.names, step.auxiliary.agreed
            if None in whole:
                self._refuse(
                    [name for name, one in zip(self._placement.names, whole, strict=True) if one is None]
                )
        for name, term in loss.auxiliary.items():
            if not term.total.requires_grad:
                raise InputError(
                    f"the auxiliary term {name} depends on nothing that is trained in this batch, and other workers would wait "
                    "for the weights of its backward pass. Make it depend on the output of the model: Loss(0 * outputs.sum(), 0)."
                )
        for param_group in self._reduction.param_groups:
            param_group.arm(reduces=False, keeps=param_group.name == "")
        self._terms.backward(loss.auxiliary, step.start, step.work.size)
        step.auxiliary.names = self._terms.names

    def _combination(self, last: int | None) -> Combination | None:
        """Return what this worker's sums are made of, in the pass that ends a step, where they are exact."""
        if not self._exact:
            return None
        return Combination(self.step.tree, last, self._owned, self.step.shards)

    def _note_use(self) -> None:
        """Remember which parameters had a gradient, and refuse a missing one that nobody announced."""
        unused: list[str] = []
        for param_group, places in zip(self._reduction.param_groups, self._reduction.places, strict=True):
            for place, member in zip(places, param_group.trained, strict=True):
                used = param_group.reduced and not any(member is one for one in param_group.missing)
                self._used[place] |= used
                unused += [] if used else [self._placement.names[place]]
        if unused and not self._find_unused_parameters:
            reached = self._reached_by_terms()
            self._refuse([name for name in unused if name not in reached])

    def _reached_by_terms(self) -> set[str]:
        """Return the parameters that an auxiliary term of this step has a gradient for."""
        if self._terms is None:
            return set()
        rows = self._terms.reached()
        for _, held in self.step.tree.nodes:
            rows += self._terms.reached(held[len(self.step.tracked) :])
        return {name for row in rows for name, there in zip(self._placement.names, row, strict=True) if there}

    def _refuse(self, unused: list[str]) -> None:
        if not unused:
            return
        raise InputError(
            f"no gradient for {', '.join(unused[:5])} on rank {self.world.rank}: this step's loss does not depend on it. "
            "If that is meant, set find_unused_parameters = True in the task, or give it to paceline.launch."
        )

    def close_shard(self, index: int) -> None:
        """Put what a finished shard left in this worker's memory into the tree, auxiliary gradients behind the main ones."""
        whole = [member.gathered for member in self._reduction.trained]
        taken: Gradients = [None if one is None else one.grad for one in whole]
        taken.append(self.step.loss_stats.grad)
        for parameter in (*whole, self.step.loss_stats):
            if parameter is not None:
                parameter.grad = None
        taken += [] if self._terms is None else self._terms.take()
        self.step.tree.add((index, index + 1), taken)

    def end_batches(self) -> None:
        """Follow the others through the rounds that are left."""
        step = self.step
        self._reduction.end_round()
        if step.left:
            raise InputError(
                f"step {step.work.number}: backward was not called for {step.left} of this worker's batches. All workers go "
                "through a sharded model together, so call it for each; a weight of 0 leaves a batch out."
            )
        while not self._reduction.over:
            self._reduction.follow(self._combination(None) if self._reduction.ends else None)

    def finish(self) -> None:
        """Bring the small sums together, behind the rounds."""
        step = self.step
        self._reduction.check_passes(f"step {step.work.number}")
        self.end_batches()
        if not step.auxiliary.agreed:
            agree_on_terms(self.world, step)
        if self._terms is not None:
            self._terms.names, self._terms.agreed = step.auxiliary.names, True
        present = self._drop_unused() if self._find_unused_parameters else None
        self._combine_small()
        stride = len(step.parameters) + 1
        flat: Gradients = []
        for number, _ in enumerate(step.auxiliary.names):
            rows: Gradients = [*self._reduction.scatter_terms(step.tree, stride * (number + 1))]
            if present is not None:  # what nobody has a gradient for stays without one
                rows = [one if there else None for one, there in zip(rows, present[number], strict=True)]
            flat += [*rows, self._entries[number]]
        step.auxiliary.give(flat)
        self._reduction.end()
        step.tree.nodes = []  # whole gradients that have left need no memory any more

    def _drop_unused(self) -> list[list[bool]]:
        """Return no gradient to parameters that nobody had one for: they stay as they are, weight decay and all.

        Return the same of each auxiliary term.
        """
        step, count = self.step, len(self.step.parameters)
        mine = torch.zeros(1 + len(step.auxiliary.names), count, dtype=torch.int32)
        mine[0] = torch.tensor(self._used, dtype=torch.int32)
        for _, held in step.tree.nodes:
            rows = [[one is not None for one in held[:count]], *step.auxiliary.reached(held[count + 1 :])]
            mine |= torch.tensor(rows, dtype=torch.int32)
        found: list[list[bool]] = self.world.comm.all_reduce(mine, "max").bool().tolist()
        used, *terms = found
        for parameter, there in zip(step.parameters, used, strict=True):
            if not there:
                parameter.grad = None
        return terms

    def _combine_small(self) -> None:
        """Add up the loss statistics and the auxiliary terms' own: two numbers each."""
        step, stride = self.step, len(self.step.parameters) + 1
        nothing = torch.full((2,), -0.0, dtype=step.loss_stats.dtype, device=self.world.device)
        ends = range(stride - 1, stride * (len(step.auxiliary.names) + 1), stride)
        sums = []
        for _, held in step.tree.nodes:
            entries = [held[end] if end < len(held) else None for end in ends]
            sums.append(torch.cat([nothing if entry is None else entry for entry in entries]))
        total = self._reduction.scatter.add_small(sums).view(-1, 2)
        step.loss_stats.grad, self._entries = total[0].clone(), list(total[1:].clone())

    def norm(self, held: Sequence[Tensor | None], *, wanted: bool) -> Tensor | None:  # noqa: ARG002
        """Return the norm over everybody's rows."""
        return self._reduction.norm() if wanted else None

    def unscale(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """Undo the scale of fp16 gradients; an overflow in anybody's rows is everybody's."""
        super().unscale(scaler, optimizer)
        for found in optim.overflows(scaler, optimizer):
            self._place.comm.all_reduce_(found, "max").wait()

    def abandon(self) -> None:
        """Release shared memory at once: the parameter groups are a circle with the model, which may stay for long."""
        self._reduction.abandon()


class GatheringSchedule(Schedule):
    """The same order of passes, in rounds that all workers go through together."""

    def __init__(self, reduction: FsdpReduction, rounds: KnownRounds) -> None:
        self._reduction, self._rounds = reduction, rounds
        self.open_batch = reduction.open_root

    def train(self, passes: Passes, work: StepWork, loss: LossFunction) -> None:
        """Compute all passes; a loss that reaches for weights that are not gathered is refused."""
        super().train(passes, work, named_reach(loss, self._reduction.blocks))

    def measure(self, passes: Passes, works: Iterable[StepWork], metrics: MetricsFunction) -> Rows:
        """Measure this worker's shards, and follow the others through theirs."""
        rows = super().measure(passes, works, named_reach(metrics, self._reduction.blocks))
        self._reduction.check_passes("evaluation")
        return rows

    def open_work(self, work: StepWork) -> None:
        """Begin the rounds of some shards."""
        self._reduction.enter()
        self._reduction.begin(self._rounds.rounds(work))

    def close_batch(self, measured: Mapping[str, Any]) -> None:
        """End a pass that has no way back."""
        check_measured(measured, self._reduction.blocks)
        self._reduction.end_forward()

    def close_work(self) -> None:
        """Follow the others through what they have left."""
        while not self._reduction.over:
            self._reduction.follow(None)
        self._reduction.end()


def is_exact(inputs: StrategyInputs) -> bool:
    """Return whether sums are those of one process."""
    return inputs.exactness is Exactness.BITWISE and inputs.tuning.fsdp_dtype == "fp32"

"""One step as one worker takes it: what trains, what the passes have added up, and what must not change meanwhile.

The loss statistics are a parameter of two numbers that rides along: its gradient is the sum of the losses and the sum of
the weights. Whatever combines the gradients combines it too, so the exact loss and the exact weight of the
global batch cost no message of their own. Gradients are scaled beforehand by the number of samples, which
everyone knows; only where the true weight turns out to be another one (tokens, say) are they corrected.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.reduce.tree import Gradients, TreeSum, add
from paceline.strategies import gradients, sparse
from paceline.strategies.auxiliary import Auxiliary
from paceline.strategies.base import StepWork
from paceline.strategies.guards.loss_checks import check_loss, check_trainable, refuse_detached
from paceline.strategies.guards.trained import HasParameters, Trained
from paceline.strategies.guards.writes import Writes
from paceline.strategies.memory.recompute import check_passes
from paceline.strategies.tuning import Tuning
from paceline.task import Loss
from paceline.world.fault_points import BACKWARD, hit

Add = Callable[[Gradients, Gradients], Gradients]


class StepState:
    """What the passes of one step share with what adds up their gradients."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        part: HasParameters,
        parameters: list[nn.Parameter],
        tuning: Tuning,
        shards: int,
        device: torch.device,
        *,
        watched: bool,
        mine: HasParameters | None = None,
    ) -> None:
        """`part` is what is here of the model, `parameters` those of it that train; `watched` refuses passes that write to it.

        `mine` is the part that trains in one turn, where others take turns with it.
        """
        self.model, self._part, self.mine = model, part, mine
        self.device = self._home = device
        """Where the open shard is computed."""
        kind = gradients.ledger_type(model.parameters())
        self.loss_stats = nn.Parameter(torch.zeros(2, dtype=kind, device=device))
        self.trained = Trained(self._part if mine is None else mine, optimizer)
        """What is wired up."""
        self.shards = shards
        self.scaler: torch.amp.GradScaler | None = None
        self.work = StepWork(0, 0, ())
        self.open = 0
        """The shard whose batches are computed."""
        self.left = 0
        """Batches of this worker whose backward pass is still to come."""
        self.given = 0
        """Those of them that were given out."""
        self.totals: list[tuple[int, Tensor]] = []
        """The loss of each batch of this step with its shard, to find where a bad one came from."""
        self._watched = watched
        self.counts_writes = True
        """Whether in-place writes that torch counts are refused, too; autograd finds those that a backward pass still needs."""
        self.recompute = tuning.activation_checkpointing
        self._starts: dict[tuple[int, torch.dtype], Tensor] = {}
        if mine is not None:
            parameters = [one for _, one in mine.named_parameters() if one.requires_grad]
        self.auxiliary = Auxiliary(parameters, kind)
        self._wire(parameters)

    def _wire(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.tracked = [*parameters, self.loss_stats]
        known = None if self.mine is None else set(map(id, parameters))
        self.others = [
            one for _, one in self._part.named_parameters() if known is not None and id(one) not in known
        ]
        """Those that have no turn: passes may leave gradients there, which belong to no sum."""
        self.sparse = [
            one for one in sparse.sparse_parameters(self.model) if known is None or id(one) in known
        ]
        """Those whose gradients are a few rows."""
        self.add: Add = sparse.add if self.sparse else add
        self.writes = Writes(self._part.named_parameters()) if self._watched else None
        self.tree = TreeSum(self.shards, self.add)

    def rewire(self) -> None:
        """Train what requires gradients now."""
        every = (
            self.model.parameters() if self.mine is None else (one for _, one in self.mine.named_parameters())
        )
        parameters = [parameter for parameter in every if parameter.requires_grad]
        check_trainable(parameters)
        self.auxiliary = self.auxiliary.over(parameters)
        self._wire(parameters)

    def begin(self, work: StepWork) -> None:
        """Start a step with no gradients."""
        self.work = work
        self.left, self.given = sum(len(shard.batches) for shard in work.shards), 0
        if self.auxiliary.names:
            self.auxiliary.take()
        self.totals = []
        self.forget()
        if self.writes is not None:
            self.writes.begin()

    def forget(self) -> None:
        """Drop all gradients of the step."""
        self.tree.nodes = []
        self._clear()

    def _clear(self) -> None:
        for parameter in (*self.tracked, *self.others):
            parameter.grad = None

    def enter(self, loss: Loss) -> None:
        """Take note of a loss whose backward pass comes next, or refuse it."""
        check_loss(loss)
        if not loss.total.requires_grad:
            refuse_detached()
        hit(BACKWARD)
        if self.given == 0:
            raise InputError(
                f"step {self.work.number}: backward was called more often than batches were given. Call it once for each batch, "
                "with the sum of what belongs together; to take a batch in smaller pieces say micro_batch= (--micro-batch)."
            )
        self.left, self.given = self.left - 1, self.given - 1
        self.totals += [(self.open, part.total.detach()) for part in (loss, *loss.auxiliary.values())]
        if loss.auxiliary:
            check_passes(self.recompute)
            sparse.check_terms(self.sparse)

    def start(self, dtype: torch.dtype) -> Tensor:
        """Return the gradient that a backward pass starts from: one over the samples of the global batch."""
        key = (self.work.size, dtype)
        if key not in self._starts:
            self._starts[key] = torch.full((), 1.0 / self.work.size, dtype=dtype, device=self._home)
        start = self._starts[key]
        if self.scaler is not None:
            start = self.scaler.scale(start)
        return start if self.device == self._home else start.to(self.device)

    def is_whole(self, loss: Loss) -> bool:
        """Return whether a loss is that of the whole global batch, by whose weight its backward pass may divide."""
        shards = self.work.shards
        return (
            self.shards == len(shards) == 1
            and len(shards[0].batches) == 1
            and not loss.auxiliary
            and self.scaler is None
            and loss.total.dtype in (torch.float32, torch.float64)
        )

    def starts(self, loss: Loss, *, divided: bool = False) -> tuple[Tensor, Tensor]:
        """Return the gradients that a pass starts from at the loss and at its statistics.

        The loss is `divided` by its own weight, else by the number of samples.
        """
        dtype, size = loss.total.dtype, self.work.size
        entry = gradients.loss_entry(loss, size, self.loss_stats.dtype)
        if divided:
            return entry[1].reciprocal().to(loss.total.device, dtype), entry
        known = self._starts.get((size, dtype)) if self.scaler is None and self.device is self._home else None
        return self.start(dtype) if known is None else known, entry

    def take(self) -> Gradients:
        """Return the gradients gathered since the last call, auxiliary ones behind the main ones."""
        taken: Gradients = [parameter.grad for parameter in self.tracked]
        self._clear()
        taken += self.auxiliary.take()
        if self.device == self._home:
            return taken
        return [None if one is None else one.to(self._home) for one in taken]

    def give(self, summed: Gradients) -> None:
        """Set `.grad`, and what the auxiliary terms hold, to summed gradients."""
        for parameter, gradient in zip(self.tracked, summed, strict=False):
            parameter.grad = gradient
        self.auxiliary.give(summed[len(self.tracked) :])

    def check_unchanged(self) -> None:
        """Refuse what changed since the step began: some of its gradients were never summed."""
        if self.trained.changed:
            raise InputError(
                f"step {self.work.number}: {self.trained.words()} in the middle of a step, when some of its gradients had been "
                "made. Change what trains between two steps: before `for batch in step`."
            )
        if self.writes is not None:
            self.writes.check(self.work.number, counted=self.counts_writes)

"""The contract of a strategy: how one step over a global batch is computed and combined.

A strategy owns neither launching nor files. It turns the parts of a task into a `Replica`, and the loop only
ever talks to that, so no loop branches by strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.state.chunks import Catalogue, LocalState, Read
from paceline.strategies.buffers import Rule
from paceline.strategies.guards import check_optimizer, check_scheduler
from paceline.strategies.precision import Precision
from paceline.strategies.result import StepResult
from paceline.strategies.structure import Structure
from paceline.strategies.tuning import Tuning
from paceline.task import Loss, Mean
from paceline.world import World

LossFunction = Callable[[nn.Module, Any], Loss]
MetricsFunction = Callable[[nn.Module, Any], dict[str, Mean]]


Rows = dict[tuple[int, int, int], dict[str, Mean]]
"""What evaluation measured, by (step, shard, batch of the shard)."""


class Exactness(StrEnum):
    """How close a strategy's answer is to the one process's."""

    BITWISE = "bitwise"
    NUMERIC = "numeric"
    STATISTICAL = "statistical"


@dataclass(frozen=True, kw_only=True)
class StrategyInputs:
    """What a strategy is given to work with."""

    make_model: Callable[[], nn.Module]
    """Makes the model, each time with the same weights; or gives one that the user has made."""
    make_optimizer: Callable[[nn.Module], Optimizer]
    make_scheduler: Callable[[Optimizer], LRScheduler | None]
    precision: Precision
    shards: int
    """V: how many logical shards a global batch has, on all workers together."""
    threads: int = 1
    """Replicas inside this process, for strategies that work on threads."""
    exactness: Exactness = Exactness.BITWISE
    """The level this run promises: a strategy may take a cheaper way to a lower one."""
    buffer_rules: Mapping[str, Rule] = field(default_factory=dict)
    """How buffers that shards make differ are combined, by name or pattern."""
    sync_batchnorm: bool = False
    """Whether batch normalisation takes the statistics of the whole global batch."""
    transport: str = "auto"
    """How workers of one host exchange sums: through shared memory, over sockets (gloo), or what serves best."""
    compile: bool = False
    find_unused_parameters: bool = False
    scaler: torch.amp.GradScaler | None = None
    """The loss scaler to go on with; None makes a new one where the precision needs one."""
    agreed: bool = False
    """Whether all workers are known to hold the same weights: those of a group that has formed anew."""
    structure: Structure = field(default_factory=Structure)
    tuning: Tuning = field(default_factory=Tuning)
    remakes: bool = False
    """Whether `make_model` and `make_optimizer` can be called again in a group that has formed anew."""
    kept: Replica | None = None
    """The replica of the group before, whose model and optimizer this one goes on with where it can."""

    @property
    def carries_on(self) -> bool:
        """Whether model, optimizer and schedule of the group before are whole, and so can be gone on with as they are."""
        return self.kept is not None and self.kept.whole

    @cached_property
    def model(self) -> nn.Module:
        """The whole model in memory, made on first use."""
        return self.kept.model if self.kept is not None and self.kept.whole else self.make_model()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer over the model's parameters."""
        made = (
            self.kept.optimizer if self.kept is not None and self.kept.whole else self.make_optimizer(model)
        )
        check_optimizer(made)
        return made

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the schedule over the optimizer."""
        if self.kept is not None and self.kept.whole:
            return self.kept.scheduler
        made = self.make_scheduler(optimizer)
        check_scheduler(made, optimizer)
        return made


@dataclass(frozen=True, slots=True)
class ShardWork:
    """One logical shard of one step."""

    index: int
    seed: int
    """Where its random streams begin: a function of (seed, step, shard) alone."""
    samples: np.ndarray[Any, np.dtype[np.int64]]
    batches: Sequence[Any]


@dataclass(frozen=True, slots=True)
class StepWork:
    """This worker's share of one step."""

    number: int
    """How many steps came before, from the beginning of the run."""
    size: int
    """Samples of the whole global batch."""
    shards: Sequence[ShardWork]


class Replica(Protocol):
    """A model, its optimizer and its schedule, placed and wired up by a strategy."""

    model: nn.Module
    """The user's own module, bare, as it is saved."""
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler | None
    whole: bool
    """Whether this worker holds all of the state; else it is cut up among the workers."""
    reads_whole: bool
    """Whether `take` reads tensors whole of which it keeps a part."""

    def step(self, work: StepWork, loss: LossFunction, max_grad_norm: float | None) -> StepResult:
        """Compute one optimizer step over one exact global batch."""

    def evaluate(self, works: Iterable[StepWork], metrics: MetricsFunction) -> Rows:
        """Measure this worker's shards."""

    def state(self) -> dict[str, Any]:
        """Return model, optimizer, schedule and scaler by name, whole, independent of the strategy.

        Where the state is cut up, all workers must ask together.
        """

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state that `state` gave, of this or another strategy."""

    def settle(self) -> None:
        """Bring the workers to one state, where each goes its own way for a while; all workers call it."""

    def held(self) -> LocalState:
        """Return what this worker holds of the state, without asking anybody."""

    def take(self, catalogue: Catalogue, read: Read, rest: Mapping[str, Any]) -> None:
        """Take over this worker's part of a state of which all tensors are known and can be read in parts."""

    def abandon(self) -> None:
        """Forget the step under way, as if it had not begun, and let go of the group: it is broken.

        Only `state` and `load` are asked of the replica after this; another one is prepared with the same parts.
        """


class Leaves(NamedTuple):
    """The tensors that a loop can ask for gradients."""

    shown: Sequence[Tensor]
    """Those in which the gradients of batches add up, or their sums appear."""
    hidden: Sequence[Tensor] = ()
    """Those that have no gradient in a step, or a part of the sums only: a loop has no use for either."""


class OpenReplica(Replica, Protocol):
    """A replica that also serves a loop of the user's own, piece by piece."""

    totals: list[tuple[int, Tensor]]
    """The loss of each batch of the step with its shard, to find where a bad one came from."""

    def begin(self, work: StepWork) -> None:
        """Start a step."""

    def shard(self, work: ShardWork) -> Iterable[Any]:
        """Return the batches of one shard, on the device, with its random streams set."""

    def backward(self, loss: Loss) -> None:
        """Add one batch's gradients."""

    def combine(self) -> None:
        """Make `.grad` hold the sum over the global batch, where it ever does; `apply` does so if nobody has."""

    def leaves(self) -> Leaves:
        """Return the tensors that a backward pass of the user's own would leave gradients in."""

    def apply(self, max_grad_norm: float | None) -> StepResult:
        """Combine, normalise, clip, update."""


class Strategy(Protocol):
    """A name, a promise, and a way to prepare."""

    name: str
    exactness: Exactness
    threaded: bool
    """Whether --workers counts threads of one process instead of processes."""

    def level(self, tuning: Tuning) -> Exactness:
        """Return the level that it can promise with this tuning: its own, or less."""

    def prepare(self, parts: StrategyInputs, world: World) -> OpenReplica:
        """Place the model and wire up its gradients."""

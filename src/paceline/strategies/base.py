"""What a strategy is given to work with, and what a step is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.strategies.buffers.buffers import Rule
from paceline.strategies.compiled import Compiler
from paceline.strategies.guards.before_first_step import check_optimizer, check_scheduler
from paceline.strategies.precision import Precision
from paceline.strategies.structure import Structure
from paceline.strategies.tuning import Tuning
from paceline.task import Loss
from paceline.world import World

LossFunction = Callable[[nn.Module, Any], Loss]
MetricsFunction = Callable[[nn.Module, Any], Mapping[str, Any]]


Rows = dict[tuple[int, int, int], Mapping[str, Any]]
"""What evaluation measured, by (step, shard, batch of the shard)."""


class Exactness(StrEnum):
    """How close a strategy's answer is to the one process's."""

    BITWISE = "bitwise"
    NUMERIC = "numeric"
    STATISTICAL = "statistical"


class BuiltInStrategy:
    """What most strategies have in common: the bits of one process, on processes, whatever they are tuned by."""

    exactness = Exactness.BITWISE
    threaded = False

    def level(self, tuning: Tuning) -> Exactness:  # noqa: ARG002
        """Return the level that these options leave."""
        return self.exactness


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
    """Whether what a step computes is compiled: the loss with the model."""
    note: Callable[[str], None] = lambda _: None
    """Shows the user a line while the run goes on; once, whoever calls it."""
    cuda_graph: str = "off"
    """Whether steps are replayed from a CUDA graph: where it pays (auto), wherever it can be (on), or never (off)."""
    find_unused_parameters: bool = False
    gradients_seen: bool = True
    """Whether code of the user's comes by when gradients are there, and may keep them: a loop, a hook of a task."""
    several: bool = False
    """Whether the run has several optimizers, which may take turns."""
    scaler: torch.amp.GradScaler | None = None
    """The loss scaler to go on with; None makes a new one where the precision needs one."""
    weights_in_sync: bool = False
    """Whether all workers are known to hold the same weights: those of a group that has formed anew."""
    structure: Structure = field(default_factory=Structure)
    tuning: Tuning = field(default_factory=Tuning)
    can_rebuild: bool = False
    """Whether `make_model` and `make_optimizer` can be called again in a group that has formed anew."""
    previous: Previous | None = None
    """The replica of the group before, whose model and optimizer this one goes on with where it can."""

    @property
    def carries_on(self) -> bool:
        """Whether model, optimizer and schedule of the group before are whole, and so can be gone on with as they are."""
        return self.previous is not None and self.previous.whole

    @cached_property
    def model(self) -> nn.Module:
        """The whole model in memory, made on first use."""
        return self.previous.model if self.previous is not None and self.previous.whole else self.make_model()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer over the model's parameters."""
        made = (
            self.previous.optimizer
            if self.previous is not None and self.previous.whole
            else self.make_optimizer(model)
        )
        check_optimizer(made)
        return made

    def compiler(self, world: World) -> Compiler | None:
        """Return what compiles this run's steps; the one of the group before knows them already."""
        kept = self.previous.compiler if self.previous is not None and self.previous.whole else None
        if kept is not None:
            kept.world = world
        elif self.compile:
            bitwise = self.exactness is Exactness.BITWISE
            kept = Compiler(world, self.note, repeatable=bitwise, in_pieces=bitwise or world.size > 1)
        return kept

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the schedule over the optimizer."""
        if self.previous is not None and self.previous.whole:
            return self.previous.scheduler
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


class PreviousPlacement(Protocol):
    """What a group that forms anew asks the placement of the group before."""

    @property
    def carried(self) -> Mapping[str, Any]:
        """What it may want to know, by name."""

    def restore(self) -> None:
        """Make the user's own module of the model again."""


class Previous(Protocol):
    """The replica of the previous group of workers."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    compiler: Compiler | None

    @property
    def whole(self) -> bool:
        """Whether it held all of the state."""

    @property
    def placement(self) -> PreviousPlacement:
        """Where its state lay."""


class Leaves(NamedTuple):
    """The tensors that a loop can ask for gradients."""

    shown: Sequence[Tensor]
    """Those in which the gradients of batches add up, or their sums appear."""
    hidden: Sequence[Tensor] = ()
    """Those whose `.grad` is None in a step, or holds this worker's rows of the sums only."""

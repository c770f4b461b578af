"""A worker's own weights, which train locally and are averaged over the workers now and then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.state.chunks import OPTIMIZER, Catalogue, ChunkBounds, LocalState, Read, assemble, split
from paceline.strategies.base import StrategyInputs
from paceline.strategies.buffers.buffers import Buffers, Versions, gather_rows
from paceline.strategies.guards.writes import Writes
from paceline.strategies.local_sgd.averaging import Averaging, wide
from paceline.strategies.local_sgd.outer import Nesterov
from paceline.strategies.placement import (
    Optimize,
    WholePlacement,
    load_whole_state,
    spread_weights,
    whole_state,
)
from paceline.strategies.reducer import agreed_names
from paceline.strategies.result import StepResult
from paceline.world import World, all_gather_object
from paceline.world.peer_failure import is_lost_peer

Progress = tuple[int, float, bool, int]
"""Steps since the last average, the weight of what they learned from, whether optimizers may differ, and the steps taken."""


class DriftingPlacement(WholePlacement):
    """All of the state, as this worker has it."""

    def __init__(self, inputs: StrategyInputs, world: World) -> None:
        super().__init__(inputs, world, holds_all=False)
        self.world, self._tuning = world, inputs.tuning
        self.averaging = Averaging(world, inputs.transport)
        self._in_sync = inputs.weights_in_sync
        # Not the replica of the group before itself, which would be kept in memory.
        self._before = {} if inputs.previous is None else inputs.previous.placement.carried
        self._across = Buffers(self.model, inputs.buffer_rules, world.size)
        self._across.follows_writes = False  # each step of a period puts all of them back for its shards
        self._versions: Versions | None = None
        """Where the buffers stood when the period began; None before it has."""
        self.learned = torch.zeros((), dtype=torch.float32, device=world.device)
        """The weight of what this worker has learned from since the last average."""
        self.total = torch.zeros((), dtype=torch.float32, device=world.device)
        """The same of all workers."""
        self._steps = 0
        """Steps since the last average: the same on all workers."""
        self._stirred = False
        """Whether optimizers have stepped alone since they last had the same state."""
        self.outer: Nesterov | None = None
        self.has_learned = False
        """Whether this worker had a sample in the step."""
        self._abandoned = False
        self._number = -1
        self._writes = Writes(self.model.named_parameters())

    @property
    def carried(self) -> Mapping[str, Any]:  # type: ignore[override]
        """What was learned since the last average, and the outer optimizer."""
        progress = self._steps, float(self.learned), self._stirred, self._number + 1
        return {"progress": progress, "outer": self.outer}

    # A group that forms.

    def adopt(self, optimizer: Optimizer) -> None:
        """Start from one state: the first worker's, or the mean of what those hold that trained before."""
        super().adopt(optimizer)
        self._parameters = self.parameters()
        if self._tuning.outer_optimizer == "nesterov":
            self.outer = Nesterov(self._parameters, self._tuning)
        mine: Progress = self._before.get("progress", (0, 0.0, False, 0))
        found: list[Progress] = all_gather_object(self.world.comm, mine)
        # Whoever has taken over another's state in between stands at the beginning of a period, like a newcomer.
        source = next((rank for rank, (steps, *_) in enumerate(found) if steps), None)
        furthest = max(taken for *_, taken in found)
        # Some may have the mean already that the group broke in for the others.
        averaged = [
            rank for rank, (steps, *_, taken) in enumerate(found) if not steps and taken == furthest > 0
        ]
        self._stirred = any(stirred for _, _, stirred, _ in found)
        self.outer = self._before.get("outer") or self.outer
        if not self._in_sync:
            spread_weights(self.model, self.world)
        if source is not None and averaged:
            spread_weights(self.model, self.world, averaged[0])
            if self.outer is not None:
                spread_weights(self.outer.tensors(), self.world, averaged[0])
            return
        if self.outer is not None:
            if source is None:
                self.outer.start()
            spread_weights(self.outer.tensors(), self.world, source or 0)
        if source is not None:
            # Each had the buffers of its own shards; rules need a beginning that newcomers do not know.
            spread_weights(self.model.buffers(), self.world, source)
            self._steps = 1
            self.learned += mine[1]
            self.total += sum(learned for _, learned, *_ in found)
            self._average()

    # Steps and averages.

    def is_together(self, number: int) -> bool:
        """Return whether a step is one of the first, which are taken together."""
        return number < self._tuning.local_warmup

    def open_period(self) -> None:
        """Note where the buffers stand when a period begins."""
        if self._versions is None:
            self._across.begin()
            self._versions = self._across.open_shard(self.model)

    def update(self, optimize: Optimize, result: StepResult) -> None:
        """Step alone; a worker without a sample waits. At the end of a period, average."""
        self._number = result.number
        together = self.is_together(result.number)
        optimize(steps=together or self.has_learned)
        if together:
            if self.outer is not None and result.number + 1 == self._tuning.local_warmup:
                self.outer.start()
            return
        self._steps += 1
        self._stirred = True
        if (result.number + 1 - self._tuning.local_warmup) % self._tuning.local_steps == 0:
            try:
                self._average()
            except Exception as error:
                if not is_lost_peer(error) and not self.world.interruption.raised:
                    raise
                # The step is taken, its schedule included: whoever took it once more would be a step ahead of all others.
                # What is missing is the mean, with which the next group begins.

    @torch.no_grad()
    def _average(self) -> None:
        """Make the parameters and buffers of all workers one again, if they have gone their own ways."""
        if not self._steps or self._abandoned:
            return
        share = torch.where(self.total > 0, self.learned / self.total, 1.0 / self.world.size)
        values = self._parameters if self.outer is None else self.outer.changes(self._parameters)
        means = self.averaging.sum([wide(value) * share for value in values])
        self._average_buffers()
        # Nothing can fail half-way from here on: every sum has arrived.
        if self.outer is not None:
            self.outer.step(means)
            means = self.outer.anchors
        for parameter, mean in zip(self._parameters, means, strict=True):
            parameter.copy_(mean)
        self._begin_period()

    def _average_buffers(self) -> None:
        if self._versions is None:
            return
        across, everybody = self._across, self.averaging.world
        across.close_shard(self.world.rank, self.model, self._versions)
        across.combine(
            lambda names: agreed_names(self.world, names, across),
            lambda rows: gather_rows(rows, across.like(), everybody, self.world.size),
        )
        across.end_step()
        self._versions = None

    def _begin_period(self) -> None:
        self.learned.zero_()
        self.total.zero_()
        self._steps = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Average the weights over the workers for the duration of an evaluation."""
        self._average()
        self._writes.begin()
        yield
        self._writes.check(self._number)

    # State.

    def synchronize(self) -> None:
        """Bring all workers to one state; all must call it."""
        self._average()
        if self._stirred and not self._abandoned:
            self.averaging.average_optimizers(self.model, self.optimizer)
            self._stirred = False

    def align(self) -> None:
        """Do the same; of a group that is broken the state is this worker's own."""
        self.synchronize()

    def local_state(self) -> LocalState:
        """Return this worker's own state as it is."""
        state = whole_state(self.model, self.optimizer)
        if self.outer is not None:
            self.outer.put_into(state[OPTIMIZER]["state"], self._names())
        return split(state)

    def load_local_state(self, catalogue: Catalogue, read: Read, extra_state: Mapping[str, Any]) -> None:
        """Load a state: a new period begins. Whether optimizers differ stays open: it may be this worker's own state."""
        tensors = {key: read(key, ChunkBounds.whole(meta.shape)) for key, meta in catalogue.items()}
        state = assemble(tensors, extra_state)
        if self.outer is not None:
            slots = self.outer.take_from(state[OPTIMIZER]["state"], self._names())
            state = {**state, OPTIMIZER: {**state[OPTIMIZER], "state": slots}}
        load_whole_state(self.model, self.optimizer, state)
        if self.outer is not None:
            self.outer.start()
        self._begin_period()
        self._versions = None

    def _names(self) -> list[str]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [names[id(parameter)] for parameter in self._parameters]

    def abandon(self) -> None:
        """Keep what was learned before the step in flight, for the next group's average."""
        self._abandoned = True

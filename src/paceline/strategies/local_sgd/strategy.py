"""Workers step alone and average their weights now and then: local SGD, and DiLoCo with `--outer-optimizer nesterov`.

A step goes over this worker's shards only: their gradient over their own weight, clipped by its own norm, through this
worker's own optimizer. Only two numbers travel, so the loss of every step is exact over the whole global batch (the
gradient norm is this worker's). After every `--local-steps` steps the parameters become their mean, each worker counting
for the weight it has learned from since the last one, and buffers what their rules say. So with plain SGD and one local
step the answer is ddp's up to rounding; it is ddp's to the bit in the first `--local-warmup` steps, which are taken
together, and one process's to the bit on one worker without an outer optimizer.

`--outer-optimizer nesterov` takes the mean change since the last average as the gradient of an SGD with Nesterov momentum. That
momentum is part of the state, as the slot `outer_momentum` of each parameter.

An evaluation, a checkpoint and a new group end the period early: they average first, a checkpoint the optimizers' state
too, so that one state can be saved and any number of workers go on from it. What a lost worker had learned since the last
average is lost with it, and whoever was a step behind takes over the weights of one that was ahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InputError
from paceline.reduce.post_backward import PostBackwardReduce
from paceline.reduce.tree import add
from paceline.state.chunks import OPTIMIZER, LocalState, split
from paceline.strategies.base import Exactness, MetricsFunction, OpenReplica, Rows, StepWork, StrategyInputs
from paceline.strategies.buffers import Buffers, Versions, gather_rows
from paceline.strategies.buffers import Rows as BufferRows
from paceline.strategies.local_sgd.averaging import Averaging, wide
from paceline.strategies.local_sgd.outer import Nesterov
from paceline.strategies.refusals import refuse_sparse
from paceline.strategies.result import StepResult, check_norm
from paceline.strategies.sequential import SequentialReplica
from paceline.strategies.trained import check_held
from paceline.strategies.tuning import Tuning
from paceline.strategies.writes import Writes
from paceline.world import World, all_gather_object


class LocalSgd:
    """Steps alone, averages now and then."""

    name = "local-sgd"
    exactness = Exactness.STATISTICAL
    threaded = False

    def level(self, tuning: Tuning) -> Exactness:  # noqa: ARG002
        """Return its own level: no tuning changes it."""
        return self.exactness

    def prepare(self, parts: StrategyInputs, world: World) -> OpenReplica:
        """Make a replica that averages; one that has nobody to average with is one process."""
        if parts.precision.name == "fp16":
            raise InputError(
                "--strategy local-sgd has no loss scaler that all workers share, which --precision fp16 needs. Use bf16."
            )
        if parts.sync_batchnorm:
            raise InputError(
                "--sync-batchnorm needs the samples of all workers in each step, and --strategy local-sgd takes steps alone. "
                "Use --strategy ddp."
            )
        alone = world.size == 1 and parts.tuning.outer_optimizer == "average"
        if alone:
            return SequentialReplica(parts, world)
        refuse_sparse(parts.model, "local-sgd")
        return LocalReplica(parts, world)


class LocalReplica(SequentialReplica):
    """One worker's model, which goes its own way for a while."""

    def __init__(self, parts: StrategyInputs, world: World) -> None:
        super().__init__(parts, world)
        check_held(self.model, self.optimizer)
        self._tuning = parts.tuning
        self._averaging = Averaging(world, parts.transport)
        self._sums = (
            PostBackwardReduce(world, parts.shards, parts.transport, strategy="local-sgd")
            if parts.tuning.local_warmup
            else None
        )
        self._across = Buffers(self.model, parts.buffer_rules, world.size)
        self._versions: Versions | None = None
        """Where the buffers stood when the period began; None before it has."""
        self._own: Tensor | None = None
        """This worker's own loss and weight of the step under way."""
        self._learned = torch.zeros((), device=world.device)
        """The weight of what this worker has learned from since the last average."""
        self._total = torch.zeros((), device=world.device)
        """The same of all workers."""
        self._steps = 0
        """Steps since the last average: the same on all workers."""
        self._stirred = False
        """Whether optimizers have stepped alone since they last had the same state."""
        self.outer = (
            Nesterov(self.parameters, parts.tuning) if parts.tuning.outer_optimizer == "nesterov" else None
        )
        self._abandoned = False
        self._max_grad_norm: float | None = None
        self._writes = Writes(self.model.named_parameters())
        self._meet(parts)

    # A group that forms.

    def _meet(self, parts: StrategyInputs) -> None:
        """Start from one state: the first worker's, or the mean of what those hold that trained before."""
        before = parts.kept if isinstance(parts.kept, LocalReplica) else None
        mine = before.progress if before is not None else (0, 0.0, False)
        found: list[tuple[int, float, bool]] = all_gather_object(self.world.comm, mine)
        # Whoever has taken over another's state in between stands at the beginning of a period, like a newcomer.
        source = next((rank for rank, (steps, *_) in enumerate(found) if steps), None)
        self._stirred = any(stirred for *_, stirred in found)
        if before is not None and before.outer is not None:
            self.outer = before.outer
        if not parts.agreed:
            self._averaging.send_from(0, list(self.model.state_dict().values()))
        if self.outer is not None:
            if source is None:
                self.outer.start()
            self._averaging.send_from(source or 0, self.outer.tensors())
        if source is not None:
            # Each had the buffers of its own shards; rules need a beginning that newcomers do not know.
            self._averaging.send_from(source, list(self.model.buffers()))
            self._steps = 1
            self._learned += mine[1]
            self._total += sum(learned for _, learned, _ in found)
            self._average()

    @property
    def progress(self) -> tuple[int, float, bool]:
        """Steps taken since the last average, the weight of what they learned from, and whether optimizers may differ."""
        return self._steps, float(self._learned), self._stirred

    # One step.

    @property
    def _together(self) -> bool:
        return self._work.number < self._tuning.local_warmup

    def begin(self, work: StepWork) -> None:
        """Start a step; the first one of a period notes where the buffers stand."""
        super().begin(work)
        self._writes.begin()
        if self._versions is None and not self._together:
            self._across.begin()
            self._versions = self._across.open_shard(self.model)

    def _finish_combination(self) -> None:
        """Make `.grad` this worker's own sum, or everybody's where the step is taken together."""
        self._writes.check(self._work.number)
        if not self.auxiliary.settled:
            names = all_gather_object(self.world.comm, self.auxiliary.names)
            self.auxiliary.names = max(names, key=len)
            self.auxiliary.settled = True
        if self._together and self._sums is not None:
            self._give(self._sums.sum(self._tree, self._like()))
            self._own = None
        else:
            (_, total), *others = self._tree.nodes
            for _, more in others:
                total = add(total, more)
            self._give(total)
            self._own = self.ledger.grad
        if self.ledger.grad is None:
            self.ledger.grad = torch.zeros_like(self.ledger)

    def _like(self) -> list[Tensor]:
        behind = [*self.parameters, self.ledger] * len(self.auxiliary.names)
        return [one.detach() for one in [*self.tracked, *behind]]

    def _result(self, entry: Tensor) -> StepResult:
        """Return the exact loss of the global batch: a few numbers from everybody."""
        result = super()._result(entry)
        if self._together:
            return result
        # A worker without a sample knows the names of the terms, but has no entry for them.
        names, empty = self.auxiliary.names, torch.zeros_like(entry)
        ledger = torch.stack([entry, *(result.terms.get(name, empty) for name in names)])
        entry, *terms = self._averaging.sum_small(ledger)
        self._total += entry[1]
        if self._own is not None:
            self._learned += self._own[1]
        return StepResult(self._work.number, self._work.size, entry, dict(zip(names, terms, strict=True)))

    def _factor(self, result: StepResult) -> Tensor | float:
        """Divide by this worker's own weight."""
        if self._together:
            return result.factor
        if self._own is None:
            return 1.0
        weight = self._own[1]
        return torch.where(weight > 0, self._work.size / weight, 0.0)

    def _check_norm(self, result: StepResult) -> None:
        """Raise on all workers where anybody's own norm is no number: whoever goes on alone would wait for ever."""
        if self._max_grad_norm is None or self._together:
            return super()._check_norm(result)
        norm = None if result.norm is None else float(result.norm)
        bad = torch.tensor([0.0 if norm is None or math.isfinite(norm) else 1.0])
        if self.world.comm.all_reduce(bad).any():
            check_norm(self._work.number, math.nan)
        return None

    def apply(self, max_grad_norm: float | None) -> StepResult:
        """Combine, normalise, clip, update."""
        self._max_grad_norm = max_grad_norm
        return super().apply(max_grad_norm)

    def _update(self) -> None:
        """Step alone; a worker without a sample waits. At the end of a period, average."""
        if self._together or self._own is not None:
            super()._update()
        elif self.scheduler is not None:
            self.scheduler.step()
        if self._together:
            if self.outer is not None and self._work.number + 1 == self._tuning.local_warmup:
                self.outer.start()
            return
        self._steps += 1
        self._stirred = True
        if (self._work.number + 1 - self._tuning.local_warmup) % self._tuning.local_steps == 0:
            self.buffers.settle()
            self._average()

    def _agree_on_buffers(self, names: list[str]) -> list[str]:
        every = {name for part in all_gather_object(self.world.comm, names) for name in part}
        return [name for name, _ in self.model.named_buffers() if name in every]

    def _gather_buffers(self, rows: BufferRows) -> BufferRows:
        return gather_rows(rows, self.buffers.like(), self.world, self._shards) if self._together else rows

    # Averages.

    @torch.no_grad()
    def _average(self) -> None:
        """Make the parameters and buffers of all workers one again, if they have gone their own ways."""
        if not self._steps or self._abandoned:
            return
        share = torch.where(self._total > 0, self._learned / self._total, 1.0 / self.world.size)
        values = self.parameters if self.outer is None else self.outer.changes(self.parameters)
        means = self._averaging.sum([wide(value) * share for value in values])
        self._average_buffers()
        # Nothing can fail half-way from here on: every sum has arrived.
        if self.outer is not None:
            self.outer.step(means)
            means = self.outer.anchors
        for parameter, mean in zip(self.parameters, means, strict=True):
            parameter.copy_(mean)
        self._learned.zero_()
        self._total.zero_()
        self._steps = 0

    def _average_buffers(self) -> None:
        if self._versions is None:
            return
        self._across.close_shard(self.world.rank, self.model, self._versions)
        across = self._across
        across.combine(
            self._agree_on_buffers,
            lambda rows: gather_rows(rows, across.like(), self._averaging.world, self.world.size),
        )
        across.settle()
        self._versions = None

    def settle(self) -> None:
        """Bring all workers to one state; all must call it."""
        self._average()
        if self._stirred and not self._abandoned:
            self._averaging.average_optimizers(self.model, self.optimizer)
            self._stirred = False

    # Evaluation and state.

    def evaluate(self, works: Iterable[StepWork], metrics: MetricsFunction) -> Rows:
        """Average, then measure."""
        self._average()
        self._writes.begin()
        rows = super().evaluate(works, metrics)
        self._writes.check(self._work.number)
        return rows

    def state(self) -> dict[str, Any]:
        """Average, then give the state that all workers share; all must ask together.

        Of a group that is broken it is this worker's own.
        """
        self.settle()
        return self._state()

    def held(self) -> LocalState:
        """Return this worker's own state as it is."""
        return split(self._state())

    def _state(self) -> dict[str, Any]:
        state = super().state()
        if self.outer is not None:
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            keys = [names[id(parameter)] for parameter in self.parameters]
            self.outer.put_into(state[OPTIMIZER]["state"], keys)
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state: a new period begins. Whether optimizers differ stays open: it may be this worker's own state."""
        slots = state[OPTIMIZER]["state"]
        if self.outer is not None:
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            slots = self.outer.take_from(slots, [names[id(parameter)] for parameter in self.parameters])
        super().load({**state, OPTIMIZER: {**state[OPTIMIZER], "state": slots}})
        if self.outer is not None:
            self.outer.start()
        self._learned.zero_()
        self._total.zero_()
        self._steps, self._versions = 0, None

    def abandon(self) -> None:
        """Forget the step under way; what was learned before it stays, for the next group's average."""
        super().abandon()
        self._abandoned = True

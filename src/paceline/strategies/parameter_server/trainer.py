"""A trainer: computes its shards, pushes each server the gradients of its parameters, and goes on with the weights it gets."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline import remote
from paceline.data import owned_shards
from paceline.errors import InputError, PacelineError, RemoteError
from paceline.reduce.combination import Combination
from paceline.reduce.tree import Gradients, add
from paceline.remote.grouping import PATIENCE_S, open_group
from paceline.state.chunks import OPTIMIZER, Catalogue, LocalState, Read
from paceline.state.optimizer_state import load_optimizer_state
from paceline.strategies import gradients
from paceline.strategies.base import MetricsFunction, Rows, StepWork, StrategyInputs
from paceline.strategies.buffers import Rows as BufferRows
from paceline.strategies.buffers import gather_rows
from paceline.strategies.parameter_server import push_queue
from paceline.strategies.parameter_server.answers import Answers
from paceline.strategies.parameter_server.parcel import Packing
from paceline.strategies.parameter_server.placement import Placement
from paceline.strategies.parameter_server.state import agree_on_weights, gathered, rest_of
from paceline.strategies.partial_update import Scope
from paceline.strategies.result import StepResult
from paceline.strategies.sequential import SequentialReplica
from paceline.strategies.trained import check_equal, check_held
from paceline.strategies.writes import Writes
from paceline.world import World, all_gather_object
from paceline.world.fault_points import OPTIMIZER as OPTIMIZER_POINT
from paceline.world.fault_points import REDUCTION, hit

GOODBYE_S = 1.0
"""How long a server may take to hear that this trainer leaves."""


class TrainerReplica(SequentialReplica):
    """A model whose weights come from the servers before each step."""

    whole = False

    def __init__(self, parts: StrategyInputs, world: World) -> None:
        super().__init__(parts, world)
        check_held(self.model, self.optimizer)
        agree_on_weights(self.model, parts, world)
        self._peers = world.along("ddp")
        self._owned = owned_shards(self._peers.rank, self._peers.size, parts.shards, world.shares)
        self._staleness = parts.tuning.staleness
        self._placement = Placement(self.model, self.parameters, world.mesh.servers)
        self._parts = [[self.parameters[place] for place in places] for places in self._placement.places]
        self._packings = [Packing(part) for part in self._parts]
        self._sent_packings: list[Packing] = []
        self._session: remote.Session | None = open_group(world)
        servers = self._session.workers("servers")
        self._push = [remote.call(name, push_queue.push).options(timeout=PATIENCE_S) for name in servers]
        self._pull = [remote.call(name, push_queue.pull).options(timeout=PATIENCE_S) for name in servers]
        self._leave = [remote.call(name, push_queue.leave).options(timeout=GOODBYE_S) for name in servers]
        self._answers = Answers(world)
        self._writes = Writes(self.model.named_parameters())
        self._stale = True

    def _scope(self, parts: StrategyInputs, world: World) -> Scope:  # noqa: ARG002
        return Scope.PARAMETERS if world.mesh.servers > 1 else Scope.ELSEWHERE

    # One step.

    def begin(self, work: StepWork) -> None:
        """Start a step, in a new group or after loading with the weights that the servers have."""
        if self._stale:
            self._refresh()
        super().begin(work)
        self._writes.begin()

    @torch.no_grad()
    def _refresh(self) -> None:
        """Fetch all that the servers hold, once everybody is here and so has nothing under way."""
        self.world.comm.barrier()
        own = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }
        for held in self._answers.wait([one.future() for one in self._pull]):
            for name, value in held.items():
                own[name].copy_(value)
        self._stale = False

    def combine(self) -> None:
        """Do nothing: the servers have the sums."""

    def apply(self, max_grad_norm: float | None) -> StepResult:
        """Push this trainer's gradients; the servers combine, normalise, clip and update."""
        self.partial_update.check()
        self._check_unchanged()
        self._writes.check(self._work.number)
        if not self.auxiliary.settled:
            names = all_gather_object(self._peers.comm, self.auxiliary.names)
            self.auxiliary.names = max(names, key=len)
            self.auxiliary.settled = True
        contents, norm = self._shares(max_grad_norm) if self._staleness else (self._sums(), None)
        hit(REDUCTION)
        pushed = [
            one.future(self._peers.rank, self._work.number, content)
            for one, content in zip(self._push, contents, strict=True)
        ]
        self._pass_over()
        answers = self._answers.wait(pushed)
        entry, terms = answers[0]["entry"], answers[0]["terms"]
        if entry is None:
            raise InputError(
                f"step {self._work.number}: step.backward was never called, so there is nothing to apply."
            )
        result = StepResult(self._work.number, self._work.size, entry, terms)
        result.norm = answers[0]["norm"] if norm is None else norm
        result.check()
        hit(OPTIMIZER_POINT)
        self._take_weights(answers)
        if self.scheduler is not None:
            self.scheduler.step()
        self.buffers.settle()
        return result

    def _sums(self) -> list[push_queue.Content]:
        """Return for each server the sums of this trainer's subtrees, from left to right."""
        nodes = [held for held, _ in Combination(self._tree, None, self._owned, self._shards).nodes]
        self._lay_out()
        self.buffers.combine(self._agree_on_buffers, self._gather_buffers)
        first = self._peers.rank == 0
        contents: list[push_queue.Content] = []
        for places, packing in zip(self._placement.places, self._sent_packings, strict=True):
            parcels = [packing.pack(self._selected(held or [], places)) for held in nodes]
            contents.append({"names": self.auxiliary.names, "parcels": parcels, "buffers": {}})
        if first:
            contents[0]["buffers"] = self._changed_buffers()
        return contents

    def _selected(self, held: Gradients, places: list[int]) -> Gradients:
        """Return the gradients of a server's parameters and the ledger, those of auxiliary terms behind them."""
        stride = len(self.tracked)
        chosen = [*places, stride - 1]
        wanted = [
            start * stride + place for start in range(len(self.auxiliary.names) + 1) for place in chosen
        ]
        return [held[place] if place < len(held) else None for place in wanted]

    def _lay_out(self) -> None:
        if not self._sent_packings:
            times = len(self.auxiliary.names) + 1
            self._sent_packings = [Packing([*part, self.ledger] * times) for part in self._parts]

    def _shares(self, max_grad_norm: float | None) -> tuple[list[push_queue.Content], Tensor | None]:
        """Return for each server the mean gradient of this trainer's share, clipped by its own norm."""
        (_, total), *others = self._tree.nodes
        for _, more in others:
            total = add(total, more)
        self._give(total)
        self.buffers.combine(lambda names: names, lambda rows: rows)
        entry, terms = self.ledger.grad, self.auxiliary.entries()
        norm, weight = None, 0.0 if entry is None else float(entry[1])
        if entry is not None:
            self._check_finite([entry, *terms.values()])
            factor = self._work.size / weight if weight else 0.0
            if self.auxiliary.names:
                self.auxiliary.merge(self._work.size, factor)
                factor = 1.0
            held = [one.grad for one in self.parameters if one.grad is not None]
            norm = gradients.finish(held, factor, max_grad_norm) if held else None
        samples = sum(len(shard.samples) for shard in self._work.shards)
        facts = {
            "share": samples / self._work.size if weight else 0.0,
            "entry": torch.zeros(2) if entry is None else entry.cpu(),
            "terms": {name: one.cpu() for name, one in terms.items()},
            "buffers": {},
        }
        contents: list[push_queue.Content] = [
            {**facts, "parcel": packing.pack([one.grad for one in part])}
            for part, packing in zip(self._parts, self._packings, strict=True)
        ]
        contents[0]["buffers"] = self._changed_buffers()
        return contents, norm

    def _check_finite(self, entries: list[Tensor]) -> None:
        if not all(math.isfinite(float(one[0])) for one in entries):
            raise PacelineError(
                f"step {self._work.number}: the loss of this worker's share is not finite. The share was not pushed; find its "
                "cause with --staleness 0, which names the samples."
            )

    def _changed_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that shards change: all of them where nobody had to compare."""
        held = dict(self.model.named_buffers())
        names = self.buffers.names if self.buffers.active else list(held)
        return {name: held[name].cpu() for name in names or []}

    @torch.no_grad()
    def _take_weights(self, answers: list[push_queue.Content]) -> None:
        device = self.world.device
        for answer, part, packing in zip(answers, self._parts, self._packings, strict=True):
            values = [one for one in packing.unpack(answer["weights"], device) if one is not None]
            if part:
                torch._foreach_copy_([one.detach() for one in part], values)
        held = dict(self.model.named_buffers())
        for name, value in answers[0]["buffers"].items():
            held[name].copy_(value)

    def _pass_over(self) -> None:
        """Have whoever looks on at the moment of the update do so on all workers together.

        The optimizer's own step is the servers' business: one that is not torch's may not bear to find no gradient.
        """
        for parameter in self.tracked:
            parameter.grad = None
        _look_on(self.optimizer)
        vars(self.optimizer)["_opt_called"] = (
            True  # torch's schedules warn where no step was taken before theirs
        )

    def _agree_on_buffers(self, names: list[str]) -> list[str]:
        every = {name for part in all_gather_object(self._peers.comm, names) for name in part}
        return [name for name, _ in self.model.named_buffers() if name in every]

    def _gather_buffers(self, rows: BufferRows) -> BufferRows:
        return gather_rows(rows, self.buffers.like(), self._peers, self._shards)

    # Evaluation and state.

    def evaluate(self, works: Iterable[StepWork], metrics: MetricsFunction) -> Rows:
        """Measure with the weights that the servers have when all steps before are done."""
        if self._stale or self._staleness:
            self._refresh()
        self._writes.begin()
        rows = super().evaluate(works, metrics)
        self._writes.check(self._work.number)
        return rows

    def settle(self) -> None:
        """Refuse to save or report buffers in which trainers have parted that go through every step together."""
        if not self._staleness:
            check_equal(self.model.named_buffers(), self._peers)

    def held(self) -> LocalState:
        """Return no tensor: the servers hold them."""
        return LocalState({}, rest_of(super().state()))

    def state(self) -> dict[str, Any]:
        """Gather the state; all workers ask together."""
        return gathered(self.world, self.held())

    def load(self, state: dict[str, Any]) -> None:
        """Take over the schedule of a state; the weights come from the servers."""
        self.take({}, lambda *_: torch.empty(0), state)

    def take(self, catalogue: Catalogue, read: Read, rest: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Do the same with a state that is read in parts."""
        groups = rest[OPTIMIZER]["groups"]
        load_optimizer_state(self.model, self.optimizer, {"state": {}, "groups": groups})
        if self.scheduler is not None and rest["scheduler"] is not None:
            self.scheduler.load_state_dict(rest["scheduler"])
        self._stale = True

    def abandon(self) -> None:
        """Let go of the group, and of the servers that may still wait for this trainer."""
        super().abandon()
        session, self._session = self._session, None
        if session is None:
            return
        for one in self._leave:
            with contextlib.suppress(RemoteError, RuntimeError):  # it may be what was lost
                one()
        session.abandon()


@Optimizer.profile_hook_step
def _look_on(optimizer: Optimizer) -> None:
    """Run the hooks of a step that takes place elsewhere."""

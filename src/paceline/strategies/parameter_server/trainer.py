"""A trainer: computes its shards, pushes each server the gradients of its parameters, and goes on with the weights it gets."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.compat import foreach, optim
from paceline.data import owned_shards
from paceline.errors import InputError, PacelineError
from paceline.reduce.combination import Combination
from paceline.reduce.tree import Gradients, add
from paceline.state.chunks import MODEL, OPTIMIZER, Catalogue, ChunkBounds, LocalState, Read
from paceline.state.optimizer_state import load_optimizer_state, options_to_tell
from paceline.strategies import gradients
from paceline.strategies.base import StepWork, StrategyInputs
from paceline.strategies.guards.guarded_state import guard_state, kept_elsewhere
from paceline.strategies.guards.partial_update import Scope
from paceline.strategies.guards.trained import check_equal
from paceline.strategies.guards.writes import Writes
from paceline.strategies.in_turns.optimizers import each_of, stepping
from paceline.strategies.parameter_server import push_queue
from paceline.strategies.parameter_server.members import Dealing, ToldMembers, named_tensors
from paceline.strategies.parameter_server.packing import HostPacking
from paceline.strategies.parameter_server.stepped_options import HeardOptions
from paceline.strategies.placement import Placement, spread_weights, whole_state
from paceline.strategies.reducer import Reducer, agree_on_terms
from paceline.strategies.replica import Replica
from paceline.strategies.result import StepResult
from paceline.strategies.server_calls import ServerCalls
from paceline.strategies.step_state import StepState
from paceline.world import World
from paceline.world.fault_points import OPTIMIZER as OPTIMIZER_POINT
from paceline.world.fault_points import REDUCTION, hit


class ServedPlacement(Placement):
    """A model whose weights come from the servers before each step; this worker owns no part of the state."""

    def __init__(self, inputs: StrategyInputs, world: World) -> None:
        self.model = inputs.model.to(world.device)
        self.scope = Scope.PARAMETERS if world.mesh.servers > 1 else Scope.ELSEWHERE
        self._in_sync, self.world = inputs.weights_in_sync, world
        self.peers = world.submesh("ddp")
        self.owned = owned_shards(self.peers.rank, self.peers.size, inputs.shards, world.shares)
        """The shards of this trainer."""
        self.staleness = inputs.tuning.staleness
        self.substitutes = not self.staleness  # servers take more steps than the run then
        self._writes = Writes(self.model.named_parameters())
        self.number = 0
        """The step that was taken last."""
        self._stale = True
        self.heard = HeardOptions()

    def adopt(self, optimizer: Optimizer) -> None:
        """Meet the servers, with the first worker's weights."""
        super().adopt(optimizer)
        if not self._in_sync:
            spread_weights(self.model, self.world)
        parameters = self.parameters()
        self._names = {id(one): name for name, one in self.model.named_parameters()}
        self.dealing = Dealing(parameters, self.world.mesh.servers)
        self.wired: ToldMembers = ToldMembers(self.model)
        self.parts = [[parameters[place] for place in places] for places in self.dealing.places]
        """The parameters of each server."""
        self.packings = [HostPacking(part) for part in self.parts]
        self.servers = ServerCalls(self.world)
        self.push = self.servers.to_each(push_queue.push)
        self._pull = self.servers.to_each(push_queue.pull)

    def refresh(self) -> None:
        """Begin a step in a new group, or after loading, with the weights that the servers have."""
        guard_state(each_of(self.optimizer), self._names, kept_elsewhere("under ps a server"))
        if self._stale:
            self._fetch()

    @torch.no_grad()
    def _fetch(self) -> None:
        """Fetch all that the servers hold, once everybody is here and so has nothing in flight."""
        self.world.comm.barrier()
        own = named_tensors(self.model)
        told = []
        for held, options in self.servers.wait([one.future() for one in self._pull]):
            told.append(options)
            for name, value in held.items():
                own[name].copy_(value)
        self.heard.hear(self.optimizer, told, together=not self.staleness)
        self._stale = False

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure with the weights that the servers have when all steps before are done."""
        if self._stale or self.staleness:
            self._fetch()
        self._writes.begin()
        yield
        self._writes.check(self.number)

    @contextlib.contextmanager
    def substituted(self, swap: Callable[[], None]) -> Iterator[None]:  # noqa: ARG002
        """Measure with what the servers have in the place of their weights."""
        stale, kept = self._stale, {key: one.clone() for key, one in named_tensors(self.model).items()}
        self._stale = True
        try:
            yield
        finally:
            self._stale = stale
            with torch.no_grad():
                for key, one in named_tensors(self.model).items():
                    one.copy_(kept[key])

    def synchronize(self) -> None:
        """Refuse to save or report buffers in which trainers have parted that go through every step together."""
        if not self.staleness:
            check_equal(self.model.named_buffers(), self.peers)

    def local_state(self) -> LocalState:
        """Return no tensor: the servers hold them."""
        state = whole_state(self.model, self.optimizer)
        extra_state = {key: value for key, value in state.items() if key != MODEL}
        return LocalState({}, {**extra_state, OPTIMIZER: {**state[OPTIMIZER], "state": {}}})

    def wanted(self, catalogue: Catalogue) -> dict[str, ChunkBounds]:  # noqa: ARG002
        """Return nothing: the servers hold the tensors."""
        return {}

    def load_local_state(self, catalogue: Catalogue, read: Read, extra_state: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Take over the optimizer's groups; the weights come from the servers."""
        groups = extra_state[OPTIMIZER]["groups"]
        load_optimizer_state(self.model, self.optimizer, {"state": {}, "groups": groups})
        self._stale = True

    def abandon(self) -> None:
        """Release the servers, some of which may still wait for this trainer."""
        self.servers.close()


class ServedReducer(Reducer):
    """This trainer's gradients, shard by shard: the servers add them up."""

    watches = True
    shows_sums = False
    narrows = False


class ServedUpdate:
    """Pushes this trainer's gradients; the servers combine, normalise, clip and update."""

    def __init__(self, placement: ServedPlacement) -> None:
        self._placement = placement
        self._packings: list[HostPacking] = []
        """How the sums for each server travel."""

    def apply(self, replica: Replica, max_grad_norm: float | None) -> StepResult:
        """Push, and go on with the weights that the servers answer with."""
        step, placement = replica.step_state, self._placement
        replica.partial_update.check()
        step.check_unchanged()
        agree_on_terms(placement.peers, step)
        contents, norm = (
            self._shares(replica, max_grad_norm) if placement.staleness else (self._sums(replica), None)
        )
        # Servers' loops have no batches, and not all weights to compute options from.
        options = placement.heard.changed(options_to_tell(replica.optimizer))
        for content in contents:
            content["options"], content["members"] = options, placement.wired.told
        hit(REDUCTION)
        pushed = [
            one.future(placement.peers.rank, step.work.number, content)
            for one, content in zip(placement.push, contents, strict=True)
        ]
        _pass_over(replica)
        answers = placement.servers.wait(pushed)
        entry, terms = answers[0]["entry"], answers[0]["terms"]
        if entry is None:
            raise InputError(
                f"step {step.work.number}: step.backward was never called, so there is nothing to apply."
            )
        result = StepResult(step.work.number, step.work.size, entry, terms)
        result.norm = answers[0]["norm"] if norm is None else norm
        result.check()
        hit(OPTIMIZER_POINT)
        placement.number = step.work.number
        self._take_weights(answers)
        told = [one["options"] for one in answers]
        placement.heard.hear(replica.optimizer, told, together=not placement.staleness)
        replica.step_schedule()
        replica.buffers.end_step()
        return result

    def _sums(self, replica: Replica) -> list[push_queue.Content]:
        """Return for each server the sums of this trainer's subtrees, from left to right."""
        step, placement = replica.step_state, self._placement
        if replica.turns is not None and step.tree.nodes:
            held, stride = [one for _, one in step.tree.nodes], len(step.tracked)
            reached = [
                one
                for place, one in enumerate(step.parameters)
                if any(found is not None for node in held for found in node[place::stride])
            ]
            replica.turns.check_reached(step.work.number, reached)
        nodes = [held for held, _ in Combination(step.tree, None, placement.owned, step.shards).nodes]
        if not self._packings:
            times = len(step.auxiliary.names) + 1
            self._packings = [HostPacking([*part, step.loss_stats] * times) for part in placement.parts]
        replica.reducer.combine_buffers(replica.buffers)
        contents: list[push_queue.Content] = []
        for places, packing in zip(placement.dealing.places, self._packings, strict=True):
            packed = [packing.pack(_selected(step, held or [], places)) for held in nodes]
            contents.append({"names": step.auxiliary.names, "packed": packed, "buffers": {}})
        if placement.peers.rank == 0:
            contents[0]["buffers"] = _changed_buffers(replica)
        return contents

    def _shares(
        self, replica: Replica, max_grad_norm: float | None
    ) -> tuple[list[push_queue.Content], Tensor | None]:
        """Return for each server the mean gradient of this trainer's share, clipped by its own norm."""
        step, placement = replica.step_state, self._placement
        step.give(functools.reduce(add, (held for _, held in step.tree.nodes)))
        replica.buffers.combine(lambda names: names, lambda rows: rows)
        entry, terms = step.loss_stats.grad, step.auxiliary.entries()
        norm, weight = None, 0.0 if entry is None else float(entry[1])
        if entry is not None:
            _check_finite(step.work, [entry, *terms.values()])
            factor = step.work.size / weight if weight else 0.0
            if step.auxiliary.names:
                step.auxiliary.merge(step.work.size, factor)
                factor = 1.0
            held = [one.grad for one in step.parameters if one.grad is not None]
            norm = gradients.finish(held, factor, max_grad_norm) if held else None
        samples = sum(len(shard.samples) for shard in step.work.shards)
        facts = {
            "share": samples / step.work.size if weight else 0.0,
            "shards": {shard.index: len(shard.samples) for shard in step.work.shards},
            "entry": torch.zeros_like(step.loss_stats) if entry is None else entry.cpu(),
            "terms": {name: one.cpu() for name, one in terms.items()},
            "buffers": {},
        }
        contents: list[push_queue.Content] = [
            {**facts, "packed": packing.pack([one.grad for one in part])}
            for part, packing in zip(placement.parts, placement.packings, strict=True)
        ]
        contents[0]["buffers"] = _changed_buffers(replica)
        return contents, norm

    @torch.no_grad()
    def _take_weights(self, answers: list[push_queue.Content]) -> None:
        placement, device = self._placement, self._placement.world.device
        for answer, part, packing in zip(answers, placement.parts, placement.packings, strict=True):
            values = [one for one in packing.unpack(answer["weights"], device) if one is not None]
            if part:
                foreach.copy_([one.detach() for one in part], values)
        held = dict(placement.model.named_buffers())
        for name, value in answers[0]["buffers"].items():
            held[name].copy_(value)


def _selected(step: StepState, held: Gradients, places: list[int]) -> Gradients:
    """Return the gradients of a server's parameters and the loss statistics, those of auxiliary terms after them."""
    stride = len(step.tracked)
    chosen = [*places, stride - 1]
    wanted = [start * stride + place for start in range(len(step.auxiliary.names) + 1) for place in chosen]
    return [held[place] if place < len(held) else None for place in wanted]


def _check_finite(work: StepWork, entries: list[Tensor]) -> None:
    if not all(math.isfinite(float(one[0])) for one in entries):
        raise PacelineError(
            f"step {work.number}: the loss of this worker's share is not finite. The share was not pushed; find its "
            "cause with --staleness 0, which names the samples."
        )


def _changed_buffers(replica: Replica) -> dict[str, Tensor]:
    """Return the buffers that shards change: all of them where nobody had to compare."""
    held = dict(replica.model.named_buffers())
    names = replica.buffers.names if replica.buffers.active else list(held)
    return {name: held[name].cpu() for name in names or []}


def _pass_over(replica: Replica) -> None:
    """Run the hooks of the optimizer at the moment of the update, on all workers together.

    The optimizer's own step is the servers' business: one that is not torch's may not bear to find no gradient.
    """
    for parameter in replica.step_state.tracked:
        parameter.grad = None
    for one in dict.fromkeys((replica.optimizer, *stepping(replica.optimizer))):
        _look_on(one)
        optim.mark_stepped(one)  # torch's schedules warn where no step was taken before theirs


@Optimizer.profile_hook_step
def _look_on(optimizer: Optimizer) -> None:
    """Run the hooks of a step that takes place elsewhere."""

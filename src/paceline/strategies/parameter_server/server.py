"""A server: holds its part of the parameters, their optimizer and its state, and updates them with what trainers push."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.state.chunks import (
    MODEL,
    OPTIMIZER,
    Catalogue,
    ChunkBounds,
    LocalState,
    Read,
    read_whole,
    split,
)
from paceline.state.optimizer_state import Options, load_optimizer_state, same_options
from paceline.state.redistribution import own_bounds
from paceline.strategies.base import StrategyInputs
from paceline.strategies.guards.partial_update import Scope
from paceline.strategies.guards.places import refuse_made_later
from paceline.strategies.guards.writes import checksum
from paceline.strategies.parameter_server.members import Dealing, ToldMembers
from paceline.strategies.parameter_server.packing import HostPacking
from paceline.strategies.parameter_server.push_queue import Content, Push, PushQueue
from paceline.strategies.parameter_server.stepped_options import SteppedOptions
from paceline.strategies.placement import Optimize, Placement, load_weights, spread_weights, whole_state
from paceline.strategies.result import StepResult
from paceline.world import World
from paceline.world.status_page import Phase


class ServerPlacement(Placement):
    """This server's part of the state, and the way to the trainers."""

    computes = False

    def __init__(self, inputs: StrategyInputs, world: World) -> None:
        self.model = inputs.model.to(world.device)
        self.scope = Scope.PARAMETERS if world.mesh.servers > 1 else Scope.ELSEWHERE
        self._in_sync, self.world = inputs.weights_in_sync, world
        self.peers = world.submesh("ddp")
        self.trainers = world.mesh.trainers
        self.staleness = inputs.tuning.staleness
        self.substitutes = not self.staleness  # servers take more steps than the run then
        self.pushes: list[Push] = []
        """What the trainers brought for the step in flight."""
        self.applied: dict[int, set[int]] = {}
        """With staleness: the shards of the last steps whose gradients are in this server's weights."""
        previous = inputs.previous
        self._before = {} if previous is None else dict(previous.placement.carried)
        self._stepped_keys: list[set[str]] = self._before.pop("stepped", [])
        self._checked = False
        self._stale = True
        self.changing = threading.Lock()
        """Held while what a pull copies is written: with staleness others may have trained already when one comes."""

    @property
    def carried(self) -> Mapping[str, Any]:  # type: ignore[override]
        """What is in this server's weights, for a group that forms anew and takes steps again of which some is."""
        stepped = {"stepped": self._stepped_keys}
        if self._before:  # a group that came to no step
            return self._before | stepped
        return ({"applied": self.applied, "weights": self._checksums()} if self.applied else {}) | stepped

    def _checksums(self) -> list[int]:
        return [checksum(one) for one in self.parameters()]

    def adopt(self, optimizer: Optimizer) -> None:
        """Keep this server's part, and open the queue that trainers push to."""
        super().adopt(optimizer)
        if not self._in_sync:
            spread_weights(self.model, self.world)
        self.every = super().parameters()
        """All parameters that train, this server's and others'."""
        self._dealing = Dealing(self.every, self.world.mesh.servers)
        self.wired: ToldMembers = ToldMembers(self.model)
        self.places = self._dealing.places[self.peers.rank]
        """Where this server's parameters are among them."""
        self.packing = HostPacking(self.parameters())
        self._release()
        self.stepped = SteppedOptions(optimizer, self._stepped_keys)
        """What the optimizer's own step has changed in its groups."""
        self.queue = PushQueue(self._held, self.world.interruption)
        self.queue.serve(self.world)

    def parameters(self) -> list[nn.Parameter]:
        """Return this server's."""
        return [self.every[place] for place in self.places]

    def _mine(self) -> dict[str, Tensor]:
        """Return what this server has of the model, by name."""
        return self._dealing.named_at(self.peers.rank, self.model)

    # What trainers bring and get.

    def _held(self) -> tuple[dict[str, Tensor], Options]:
        """Return a copy of all that this server holds of the model, as it was between two updates, and the stepped options."""
        held = self._mine()
        with self.changing:
            weights = {name: value.detach().to("cpu", copy=True) for name, value in held.items()}
            return weights, self.stepped.noted

    def receive(self, count: int) -> list[Push]:
        """Wait for so many pushes."""
        before = self.world.status_page.enter(Phase.COMMUNICATION)
        pushes = self.queue.take(count)
        self.world.status_page.enter(before)
        return pushes

    def answer_of(
        self, entry: Tensor | None, terms: Mapping[str, Tensor], norm: Tensor | None = None
    ) -> Content:
        """Return what trainers are answered: this server's weights, and what the step came to."""
        return {
            "weights": self.packing.pack([one.detach() for one in self.parameters()]),
            "entry": None if entry is None else entry.cpu(),
            "terms": {name: one.cpu() for name, one in terms.items()},
            "norm": None if norm is None else norm.cpu(),
            "buffers": {},
            "options": self.stepped.behind_step,
        }

    def answer(self, result: StepResult | None) -> None:
        """Answer all trainers that wait for this step."""
        told = (
            self.answer_of(None, {})
            if result is None
            else self.answer_of(result.entry, result.terms, result.norm)
        )
        self.queue.answer(self.pushes, told)

    def take_options(self, pushes: Sequence[Push]) -> None:
        """Update with the options of the trainers: this loop has no batches, and not all weights."""
        told: list[Options] = [push.content["options"] for push in pushes]
        if not all(same_options(told[0], one) for one in told[1:]):
            raise InputError(
                "the optimizer's options (lr, weight_decay, ...) differ between the trainers, whose loops have changed them "
                "differently. Change them alike on every worker, not by what one has of the batch."
            )
        self.stepped.set(told[0])

    # Steps.

    def refresh(self) -> None:
        """Wait until the trainers have come to fetch what is here, in a new group or after loading."""
        if self._stale:
            self.stepped.begin()
            self.world.comm.barrier()
            self._stale = False
            self._take_over()

    def _take_over(self) -> None:
        """Know which shards of the last steps are in these weights, if they are still those of the group before."""
        before, self._before = self._before, {}
        if before and before["weights"] == self._checksums():  # not those of a checkpoint
            self.applied = before["applied"]

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Wait until the trainers have come to fetch what is here; they measure."""
        self._stale = self._stale or bool(self.staleness)
        self.refresh()
        yield

    @contextmanager
    def substituted(self, swap: Callable[[], None]) -> Iterator[None]:
        """Have the trainers fetch other values than the weights for the duration of the context."""
        self._take_over()
        stale, self._stale = self._stale, True
        with self.changing:
            swap()
        try:
            yield
        finally:
            self._stale = stale
            with self.changing:
                swap()

    def update(self, optimize: Optimize, result: StepResult) -> None:
        """Update this server's parameters, and answer; all servers have all that they need, so nothing can fail half-way."""
        with self.stepped.watch():
            optimize(schedules=False)
        optimize(steps=False)
        self.stepped.note()
        self.check_slots()
        self.keep_buffers(self.pushes[0].content["buffers"])
        self.answer(result)
        for parameter in self.parameters():
            parameter.grad = None

    def check_slots(self) -> None:
        """Refuse an optimizer whose state cannot be gathered again."""
        if self._checked or not self.optimizer.state:
            return
        self._checked = True
        for name, held in whole_state(self.model, self.optimizer)[OPTIMIZER]["state"].items():
            for slot, value in held.items():
                if not isinstance(value, Tensor):
                    raise InputError(
                        f"--strategy ps keeps tensors on its servers, but {type(self.optimizer).__name__} keeps "
                        f"{slot} = {value!r:.40} for {name}. Use --strategy ddp."
                    )

    @torch.no_grad()
    def keep_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Load the buffers that the trainers made."""
        held = dict(self.model.named_buffers())
        for name, value in values.items():
            held[name].copy_(value)

    # State.

    def _release(self) -> None:
        """Drop optimizer state that other servers keep."""
        own = {id(one) for one in self.parameters()}
        for parameter in self.every:
            if id(parameter) not in own:
                self.optimizer.state.pop(parameter, None)

    def local_state(self) -> LocalState:
        """Return this server's part; nobody is asked."""
        state, mine = whole_state(self.model, self.optimizer), self._mine()
        return split({**state, MODEL: {name: one for name, one in state[MODEL].items() if name in mine}})

    def wanted(self, catalogue: Catalogue) -> dict[str, ChunkBounds]:
        """Return the bounds of this server's tensors: each is whole."""
        return own_bounds(self.local_state().chunks, catalogue)

    def load_local_state(self, catalogue: Catalogue, read: Read, extra_state: Mapping[str, Any]) -> None:
        """Load this server's part of a state."""
        refuse_made_later(catalogue, self.model.state_dict())
        mine = self._mine()
        state = read_whole(catalogue, read, extra_state, lambda _, name: name in mine)
        load_weights(self.model, state[MODEL], strict=False)
        load_optimizer_state(self.model, self.optimizer, state[OPTIMIZER])
        self._release()
        self._stale = True

    def abandon(self) -> None:
        """Release the group, and trainers that wait here."""
        self.queue.abandon()

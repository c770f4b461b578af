"""A server: holds its part of the parameters, their optimizer and its state, and updates them with what trainers push."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline import remote
from paceline.remote.grouping import open_group
from paceline.state.chunks import MODEL, OPTIMIZER, Catalogue, ChunkBounds, LocalState, Read, assemble, split
from paceline.state.optimizer_state import load_optimizer_state
from paceline.strategies.auxiliary import Auxiliary
from paceline.strategies.base import MetricsFunction, Rows, StepWork, StrategyInputs
from paceline.strategies.parameter_server.parcel import Packing
from paceline.strategies.parameter_server.placement import Placement
from paceline.strategies.parameter_server.push_queue import Content, Push, PushQueue
from paceline.strategies.parameter_server.state import agree_on_weights, check_slots, gathered
from paceline.strategies.partial_update import Scope
from paceline.strategies.result import StepResult
from paceline.strategies.sequential import SequentialReplica
from paceline.strategies.trained import check_held
from paceline.world import World
from paceline.world.status_page import Phase


class ServerReplica(SequentialReplica):
    """What both kinds of servers share: their part of the state, and the way to the trainers."""

    whole = False

    def __init__(self, parts: StrategyInputs, world: World) -> None:
        super().__init__(parts, world)
        check_held(self.model, self.optimizer)
        agree_on_weights(self.model, parts, world)
        self._peers = world.along("ddp")
        self._trainers = world.mesh.trainers
        self._staleness = parts.tuning.staleness
        self._all = list(self.parameters)
        self._placement = Placement(self.model, self._all, world.mesh.servers)
        self._places = self._placement.places[self._peers.rank]
        self._mine = {name for name, owner in self._placement.owners.items() if owner == self._peers.rank}
        self.parameters = [self._all[place] for place in self._places]
        self.tracked = [*self.parameters, self.ledger]
        self.auxiliary = Auxiliary(self.parameters)
        self._packing = Packing(self.parameters)
        self._let_go()
        self._checked = False
        self._stale = True
        self._desk = PushQueue(self._weights, world.interruption)
        self._session: remote.Session | None = open_group(world)
        self._session.at_close(self._desk.close)

    def _scope(self, parts: StrategyInputs, world: World) -> Scope:  # noqa: ARG002
        return Scope.PARAMETERS if world.mesh.servers > 1 else Scope.ELSEWHERE

    # What trainers get.

    def _weights(self) -> dict[str, Tensor]:
        """Return all that this server holds of the model."""
        held = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }
        return {name: value.detach().cpu() for name, value in held.items() if name in self._mine}

    def _answer(
        self, result: StepResult | None, entry: Tensor | None, terms: Mapping[str, Tensor]
    ) -> Content:
        norm = None if result is None or result.norm is None else result.norm.cpu()
        return {
            "weights": self._packing.pack([one.detach() for one in self.parameters]),
            "entry": None if entry is None else entry.cpu(),
            "terms": {name: one.cpu() for name, one in terms.items()},
            "norm": norm,
            "buffers": {},
        }

    def _letters(self, count: int) -> list[Push]:
        before = self.world.pulse.enter(Phase.COMMUNICATION)
        letters = self._desk.take(count)
        self.world.pulse.enter(before)
        return letters

    # One step.

    def begin(self, work: StepWork) -> None:
        """Start a step; in a new group or after loading the trainers first fetch what is here."""
        if self._stale:
            self._refresh()
        self._work = work

    def _refresh(self) -> None:
        self.world.comm.barrier()
        self._stale = False

    def _check_slots(self) -> None:
        if not self._checked and self.optimizer.state:
            self._checked = True
            check_slots(super().state()[OPTIMIZER]["state"], type(self.optimizer).__name__)

    @torch.no_grad()
    def _keep_buffers(self, values: Mapping[str, Tensor]) -> None:
        held = dict(self.model.named_buffers())
        for name, value in values.items():
            held[name].copy_(value)

    # Evaluation and state.

    def evaluate(self, works: Iterable[StepWork], metrics: MetricsFunction) -> Rows:
        """Let the trainers measure; there is nothing to do here."""
        if self._stale or self._staleness:
            self._refresh()
        return super().evaluate(works, metrics)

    def _let_go(self) -> None:
        """Drop optimizer state that other servers keep."""
        own = {id(one) for one in self.parameters}
        for parameter in self._all:
            if id(parameter) not in own:
                self.optimizer.state.pop(parameter, None)

    def held(self) -> LocalState:
        """Return this server's part; nobody is asked."""
        state = super().state()
        mine = {name: value for name, value in state[MODEL].items() if name in self._mine}
        return split({**state, MODEL: mine})

    def state(self) -> dict[str, Any]:
        """Gather the state; all workers ask together."""
        return gathered(self.world, self.held())

    def load(self, state: dict[str, Any]) -> None:
        """Take over this server's part of a whole state."""
        held = split(state)
        forms = {key: piece.form for key, piece in held.pieces.items()}
        self.take(forms, lambda key, box: box.of(held.pieces[key].values), held.rest)

    def take(self, catalogue: Catalogue, read: Read, rest: Mapping[str, Any]) -> None:
        """Take over this server's part of a state."""
        wanted: dict[str, Tensor] = {}
        for key, form in catalogue.items():
            room, _, path = key.partition("/")
            name = path if room == MODEL else path.rpartition("/")[0]
            if name in self._mine:
                # The optimizer goes on with the very tensors it is given.
                wanted[key] = read(key, ChunkBounds.whole(form.shape)).clone()
        state = assemble(wanted, rest)
        self.model.load_state_dict(state[MODEL], strict=False)
        slots = {name: one for name, one in state[OPTIMIZER]["state"].items() if name in self._mine}
        load_optimizer_state(self.model, self.optimizer, {**state[OPTIMIZER], "state": slots})
        if self.scheduler is not None and rest["scheduler"] is not None:
            self.scheduler.load_state_dict(rest["scheduler"])
        self._let_go()
        self._stale = True

    def abandon(self) -> None:
        """Let go of the group, and of trainers that wait here."""
        self._desk.close()
        super().abandon()
        session, self._session = self._session, None
        if session is not None:
            session.abandon()

"""A server of hybrid: holds some rows of every table with their optimizer state, and updates those that a step touched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline import remote
from paceline.errors import InputError
from paceline.reduce.tree import Gradients, TreeSum
from paceline.remote.grouping import open_group
from paceline.state.chunks import LocalState
from paceline.strategies import gradients, sparse
from paceline.strategies.base import Leaves, MetricsFunction, Rows, ShardWork, StepWork, StrategyInputs
from paceline.strategies.hybrid.embedding_service import EmbeddingService, Norms, Sent
from paceline.strategies.hybrid.kept import (
    KeptReplica,
    KeptState,
    bounds,
    check_optimizer,
    check_slots,
    part_of,
)
from paceline.strategies.hybrid.tables import send_away
from paceline.strategies.offload import without_memory
from paceline.strategies.partial_update import PartialUpdate, Scope
from paceline.strategies.result import StepResult
from paceline.strategies.trained import check_held
from paceline.task import Loss
from paceline.world import World
from paceline.world.fault_points import OPTIMIZER as OPTIMIZER_POINT
from paceline.world.fault_points import hit
from paceline.world.status_page import Phase


class ServerReplica(KeptReplica):
    """Rows of the tables, and the task's optimizer over them."""

    whole = False
    reads_whole = False
    scaler: torch.amp.GradScaler | None = None

    def __init__(self, parts: StrategyInputs, world: World) -> None:
        self.world = self.everybody = world
        self.model = parts.model
        self.optimizer = parts.optimizer(self.model)
        check_optimizer(self.optimizer)
        self._partial_update = PartialUpdate(self.optimizer, Scope.ROWS, world.device)
        check_held(self.model, self.optimizer)
        place, servers = world.rank - world.mesh.trainers, world.mesh.servers
        cut = {}
        for name, table in sparse.tables(self.model).items():
            edges = bounds(table.num_embeddings, servers)
            cut[sparse.weight_of(name)] = part_of(table.weight, edges[place], edges[place + 1], world.device)
        self._kept = KeptState(self.model, (), cut)
        self._parts = list(cut.values())
        self._kept.wire(self.optimizer)
        self.scheduler = parts.scheduler(self.optimizer)
        self._empty_model()
        self.totals: list[tuple[int, Tensor]] = []
        self._work = StepWork(0, 0, ())
        self._shards = parts.shards
        self._remains: LocalState | None = None
        self._counter = EmbeddingService(self._parts, world.mesh.trainers, world.interruption)
        self._session: remote.Session | None = open_group(world)
        self._session.at_close(self._counter.close)

    def _empty_model(self) -> None:
        """Let go of what this worker does not keep: the model here only says what there is."""
        for table in sparse.tables(self.model).values():
            send_away(table, _nowhere, self.world.device)
        for parameter in self.model.parameters():
            parameter.data = without_memory(parameter.shape, parameter.dtype, self.world.device)

    # One step.

    def step(self, work: StepWork, loss: object, max_grad_norm: float | None) -> StepResult:  # noqa: ARG002
        """Take part in a step of the trainers."""
        self.begin(work)
        return self.apply(max_grad_norm)

    def begin(self, work: StepWork) -> None:
        """Serve rows for a step."""
        self._work = work
        self._counter.advance()

    def shard(self, work: ShardWork) -> Iterator[Any]:
        """Return no batch: no data is dealt to servers."""
        raise InputError(f"shard {work.index} was given to a server, which computes none.")

    def backward(self, loss: Loss) -> None:
        """Refuse: servers compute no loss."""
        raise InputError(f"a loss of weight {loss.weight} was given to a server, which computes none.")

    def combine(self) -> None:
        """Wait until `apply`: the trainers bring the sums."""

    def leaves(self) -> Leaves:
        """Return none: no loss is computed here."""
        return Leaves(())

    def apply(self, max_grad_norm: float | None) -> StepResult:  # noqa: ARG002  (the trainers say what it comes to)
        """Add up what the trainers bring along the tree, and update the rows when they say so."""
        before = self.world.pulse.enter(Phase.COMMUNICATION)
        summed = self._add_up(self._counter.collect())
        word = self._counter.confirm(_norms(summed))
        self.world.pulse.enter(before)
        result = StepResult(self._work.number, self._work.size, word.entry.to(self.world.device), {})
        if self.world.device.type == "cpu":
            result.check()
        result.norm = word.norm
        result.check_norm()  # on the CPU in any case: the trainers sent it
        self._partial_update.check()
        hit(OPTIMIZER_POINT)
        for part, gradient in zip(self._parts, summed, strict=False):
            part.values.grad = gradient
        gradients.scale([one.values() for one in summed if one is not None], word.factor)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        check_slots(self.optimizer, self._parts)
        for part in self._parts:
            part.values.grad = None
        self._counter.advance()
        return result

    def _add_up(self, brought: list[Sent]) -> Gradients:
        tree = TreeSum(self._shards, sparse.add)
        for node, held in (row for sent in brought for row in sent):
            placed: Gradients = [
                None
                if one is None
                else sparse.made_of(one[0], one[1], part.values.shape).to(self.world.device)
                for one, part in zip(held, self._parts, strict=True)
            ]
            tree.add(node, placed)
        return tree.nodes[0][1] if tree.nodes else []

    # Evaluation and state.

    def evaluate(self, works: Iterable[StepWork], metrics: MetricsFunction) -> Rows:  # noqa: ARG002
        """Serve rows while the trainers measure."""
        self._counter.advance()
        return {}

    def settle(self) -> None:
        """There is one state at all times."""

    def held(self) -> LocalState:
        """Return this server's rows."""
        if self._remains is not None:
            return self._remains
        return super().held()

    def abandon(self) -> None:
        """Let go of the group, and of trainers that wait here; what this server holds stays."""
        self._counter.close()
        session, self._session = self._session, None
        if session is None:
            return
        self._remains = self.held()
        self._kept.unwire(self.optimizer)
        session.abandon()


def _norms(summed: Gradients) -> Norms:
    return [None if one is None else sparse.norms(one).cpu() for one in summed]


def _nowhere(numbers: Tensor) -> Tensor:
    raise InputError(f"the model was called on a server, for {len(numbers)} rows. Call it on trainers only.")

"""A trainer of hybrid: computes with rows that come from the servers, and sends the gradients of those rows back.

What is dense goes through ddp. A step is applied when every server has everybody's rows: the servers then say so to all
trainers, and every trainer gives all servers the word, so that none of them stands in another step than the rest when
one is lost in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline import remote
from paceline.errors import NonFiniteLossError, RemoteError
from paceline.reduce.tree import Gradients, Subtree
from paceline.remote.grouping import open_group
from paceline.strategies import gradients, sparse
from paceline.strategies.base import MetricsFunction, Rows, StepWork, StrategyInputs
from paceline.strategies.data_parallel.ddp import DdpReplica
from paceline.strategies.hybrid import embedding_service
from paceline.strategies.hybrid.embedding_service import Norms
from paceline.strategies.hybrid.kept import KeptReplica, KeptState, bounds
from paceline.strategies.hybrid.tables import send_away
from paceline.strategies.parameter_server.answers import Answers
from paceline.strategies.partial_update import Scope
from paceline.strategies.result import StepResult
from paceline.strategies.sequential import SequentialReplica
from paceline.strategies.trained import check_held
from paceline.world import World
from paceline.world.fault_points import REDUCTION, hit

Answer = TypeVar("Answer")
GOODBYE_S = 1.0
"""How long a server may take to hear that this trainer leaves."""


@dataclass
class Traffic:
    """Bytes between one trainer and the servers, and what sending whole tables would come to."""

    looked_up: int = 0
    pushed: int = 0
    steps: int = 0
    table_bytes: int = 0

    @property
    def sparse(self) -> int:
        """What travelled: row numbers, rows, and gradients of rows."""
        return self.looked_up + self.pushed

    @property
    def dense(self) -> int:
        """What would, if every step sent the gradients of whole tables and brought their sums."""
        return 2 * self.table_bytes * self.steps


class Servers:
    """The servers as one trainer sees them."""

    def __init__(self, world: World, trainer: int, weights: Sequence[nn.Parameter]) -> None:
        self.turn = 0
        self.traffic = Traffic(table_bytes=sum(one.numel() * one.element_size() for one in weights))
        self._world, self._trainer = world, trainer
        self._edges = [torch.tensor(bounds(len(one), world.mesh.servers)) for one in weights]
        self._widths = [one.shape[1] for one in weights]
        self._types = [one.dtype for one in weights]
        self._answers = Answers(world)
        self._session: remote.Session | None = open_group(world)
        names = self._session.workers("servers")
        self._lookup = [remote.call(name, embedding_service.lookup) for name in names]
        self._push = [remote.call(name, embedding_service.push) for name in names]
        self._apply = [remote.call(name, embedding_service.apply) for name in names]
        self._leave = [
            remote.call(name, embedding_service.leave).options(timeout=GOODBYE_S) for name in names
        ]
        self._pushed: list[remote.Future[Norms | None]] = []

    def lookup(self, table: int, numbers: Tensor) -> Tensor:
        """Fetch rows by their numbers, which are in order: one call to each server that has any of them."""
        numbers = numbers.cpu()
        rows: Tensor = self._world.interruption.outlive(
            lambda: self._fetch(table, numbers),
            lambda: torch.zeros(len(numbers), self._widths[table], dtype=self._types[table]),
        )
        self.traffic.looked_up += _bytes(numbers) + _bytes(rows)
        placed: Tensor = rows.to(self._world.device)
        return placed

    def _fetch(self, table: int, numbers: Tensor) -> Tensor:
        cuts = torch.searchsorted(numbers, self._edges[table]).tolist()
        calls = [
            call.future(self.turn, table, numbers[start:stop] - int(self._edges[table][server]))
            for server, (call, start, stop) in enumerate(zip(self._lookup, cuts, cuts[1:], strict=False))
            if stop > start
        ]
        got = self._answers.wait(calls)
        empty = torch.empty(0, self._widths[table], dtype=self._types[table])
        return torch.cat(got) if got else empty

    def push(self, nodes: Sequence[tuple[Subtree, Gradients]]) -> None:
        """Send every server its rows of the sums of this trainer's subtrees."""
        parts = [[sparse.parts_of(one) if one is not None else None for one in held] for _, held in nodes]
        placed = [[one and (one[0].cpu(), one[1].cpu()) for one in held] for held in parts]
        self.traffic.pushed += sum(_bytes(*one) for held in placed for one in held if one)
        self.traffic.steps += 1
        hit(REDUCTION)
        self._pushed = [
            call.future(
                self.turn,
                self._trainer,
                [
                    (node, [one and self._share(table, server, *one) for table, one in enumerate(held)])
                    for (node, _), held in zip(nodes, placed, strict=True)
                ],
            )
            for server, call in enumerate(self._push)
        ]

    def _share(self, table: int, server: int, numbers: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        edges = self._edges[table][server : server + 2]
        start, stop = torch.searchsorted(numbers, edges).tolist()
        # Copies: a part of a tensor would travel with all of its memory.
        return numbers[start:stop] - int(edges[0]), values[start:stop].clone()

    def norms(self) -> Gradients:
        """Return the norms of all touched rows of each table, in the order of the rows, when all have pushed theirs."""
        answers = self._settled(self._pushed)
        self._pushed = []
        columns = [[one for one in column if one is not None] for column in zip(*answers, strict=True)]
        return [torch.cat(column).to(self._world.device) if column else None for column in columns]

    def apply(self, factor: float, entry: Tensor, norm: Tensor | None) -> None:
        """Have this step applied on all servers."""
        word = factor, entry.cpu(), None if norm is None else norm.cpu()
        self._settled([call.future(self.turn, *word) for call in self._apply])

    def _settled(self, futures: Sequence[remote.Future[Answer | None]]) -> list[Answer]:
        """Return the servers' answers even if the group breaks meanwhile: it may be they that apply the step already."""
        return self._answers.settled(futures)

    def close(self) -> None:
        """Let go of them; some may still wait for this trainer."""
        session, self._session = self._session, None
        if session is None:
            return
        for one in self._leave:
            with contextlib.suppress(RemoteError, RuntimeError):  # it may be what was lost
                one()
        session.abandon()


class _Trainer(KeptReplica, SequentialReplica):
    """What a trainer does otherwise than a worker that has the tables."""

    whole = False
    servers: Servers

    def _scope(self, parts: StrategyInputs, world: World) -> Scope:  # noqa: ARG002
        return Scope.PARAMETERS

    def _connect(self, everybody: World) -> None:
        """Send the tables away, and meet the servers."""
        self.everybody = everybody
        check_held(self.model, self.optimizer)
        tables = sparse.tables(self.model)
        apart = {sparse.weight_of(name) for name in tables}
        dense = [name for name, _ in self.model.named_parameters() if name not in apart]
        self._kept = KeptState(self.model, dense, {})
        self._kept.let_go(self.optimizer)
        for group in self.optimizer.param_groups:
            # Beside sparse gradients torch updates one tensor after the other; without them it would round otherwise.
            group["foreach"] = False
        self.servers = Servers(everybody, self.world.rank, self.sparse)
        for place, table in enumerate(tables.values()):
            send_away(table, _fetch(self.servers, place), self.world.device)
        size = self.servers.traffic.table_bytes / 1e6
        self.notes = (f"{', '.join(sorted(apart))} ({size:.3g} MB) on servers, the rest on every trainer.",)

    @property
    def traffic(self) -> Traffic:
        """What has travelled between this trainer and the servers."""
        return self.servers.traffic

    def begin(self, work: StepWork) -> None:
        """Start a step."""
        self.servers.turn += 1
        super().begin(work)

    def apply(self, max_grad_norm: float | None) -> StepResult:
        """Combine, normalise, clip, update, here and on the servers."""
        self._told = False
        try:
            return super().apply(max_grad_norm)
        except NonFiniteLossError:
            # The servers find the same, and say so with everybody.
            if self.ledger.grad is not None and not self._told:
                self.servers.norms()
                self.servers.apply(1.0, self.ledger.grad, None)
            raise

    def _normalise(
        self, held: list[Tensor], factor: Tensor | float, max_grad_norm: float | None
    ) -> Tensor | None:
        """Do it with the norms of the rows, which the servers know; then give them the word."""
        far = {id(one): norms for one, norms in zip(self.sparse, self.servers.norms(), strict=False)}
        measured = [far.get(id(one), one.grad) for one in self.parameters]
        present = [one for one in measured if one is not None]
        norm, factor = gradients.coefficient(present, factor, max_grad_norm if present else None)
        entry = self.ledger.grad
        if entry is None:
            raise RuntimeError("the ledger has no sum")
        self._told = True
        self.servers.apply(float(factor), entry, norm)
        gradients.scale(held, factor)
        return norm

    def _update(self) -> None:
        super()._update()
        self.servers.turn += 1

    # Evaluation and state.

    def evaluate(self, works: Iterable[StepWork], metrics: MetricsFunction) -> Rows:
        """Measure this worker's shards."""
        self.servers.turn += 1
        return super().evaluate(works, metrics)

    def abandon(self) -> None:
        """Let go of the group."""
        super().abandon()
        self.servers.close()


class LoneTrainer(_Trainer):
    """The only trainer beside the servers."""

    def __init__(self, parts: StrategyInputs, everybody: World, group: World) -> None:
        super().__init__(parts, group)
        self._connect(everybody)

    def _finish_combination(self) -> None:
        super()._finish_combination()
        self.servers.push([((0, self._shards), sparse.take(self.sparse))])


class Trainer(_Trainer, DdpReplica):
    """One of several: what is dense is summed among them."""

    same_weights = False

    def __init__(self, parts: StrategyInputs, everybody: World, group: World) -> None:
        super().__init__(parts, group)
        self._connect(everybody)

    def _leave_rows_out(self, carried: nn.Module, *, agreed: bool) -> None:  # noqa: ARG002
        """Leave them out; all have the same already, servers included."""
        super()._leave_rows_out(carried, agreed=True)

    def _combine_rows(self) -> None:
        """Have the servers add them up."""
        self.servers.push(self._row_sums.nodes)


def _fetch(servers: Servers, table: int) -> Any:
    return lambda numbers: servers.lookup(table, numbers)


def _bytes(*tensors: Tensor) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)

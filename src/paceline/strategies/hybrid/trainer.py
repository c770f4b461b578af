"""A trainer of hybrid: computes with rows that come from the servers, and sends the gradients of those rows back.

What is dense goes through ddp. A step is applied when every server has everybody's rows: the servers then say so to all
trainers, and every trainer sends all servers the commit, so that none of them stands in another step than the rest when
one is lost in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import remote
from paceline.reduce.tree import Gradients, Subtree, TreeSum
from paceline.state.optimizer_state import Options, options_to_tell
from paceline.strategies import sparse
from paceline.strategies.base import StepWork, StrategyInputs
from paceline.strategies.guards.partial_update import Scope
from paceline.strategies.guards.places import Places
from paceline.strategies.hybrid import embedding_service
from paceline.strategies.hybrid.embedding_service import Norms
from paceline.strategies.hybrid.kept import KeptPlacement, KeptState, bounds
from paceline.strategies.hybrid.tables import Fetch, check_unwritten, send_away
from paceline.strategies.placement import Optimize
from paceline.strategies.reducer import AroundReducer, Reducer, norm_of
from paceline.strategies.result import StepResult
from paceline.strategies.server_calls import ServerCalls
from paceline.strategies.step_state import StepState
from paceline.world import World
from paceline.world.fault_points import REDUCTION, hit


@dataclass
class Traffic:
    """Bytes between one trainer and the servers, and what sending whole tables would come to."""

    looked_up: int = 0
    pushed: int = 0
    steps: int = 0
    table_bytes: int = 0

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
        self._calls = ServerCalls(world)
        self._lookup = self._calls.to_each(embedding_service.lookup)
        self._push = self._calls.to_each(embedding_service.push)
        self._apply = self._calls.to_each(embedding_service.apply)
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
        got = self._calls.wait(calls)
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
        answers = self._calls.outcomes(self._pushed)  # not `wait`: it may be they that apply the step already
        self._pushed = []
        columns = [[one for one in column if one is not None] for column in zip(*answers, strict=True)]
        return [torch.cat(column).to(self._world.device) if column else None for column in columns]

    def apply(self, factor: float, entry: Tensor, norm: Tensor | None, options: Options) -> None:
        """Commit this step on all servers, with these options of the optimizer."""
        commit = factor, entry.cpu(), None if norm is None else norm.cpu(), options
        self._calls.outcomes([call.future(self.turn, *commit) for call in self._apply])

    def close(self) -> None:
        """Release them; some may still wait for this trainer."""
        self._calls.close()


class DensePlacement(KeptPlacement):
    """A trainer's part of the state: all that is dense. The tables are on the servers."""

    scope = Scope.PARAMETERS

    def __init__(self, inputs: StrategyInputs, everybody: World, group: World) -> None:
        """`everybody` is trainers and servers, `group` the trainers."""
        self.model = inputs.model.to(group.device)
        self._everybody, self._group = everybody, group
        self.servers: Servers

    def adopt(self, optimizer: Optimizer) -> None:
        """Send the tables away, and meet the servers."""
        super().adopt(optimizer)
        tables = sparse.tables(self.model)
        apart = {sparse.weight_of(name) for name in tables}
        dense = [name for name, _ in self.model.named_parameters() if name not in apart]
        self.kept = KeptState(self.model, dense, {})
        self.kept.release(optimizer)
        self.servers = Servers(self._everybody, self._group.rank, sparse.sparse_parameters(self.model))
        self._tables = [*tables.values()]
        for place, (name, table) in enumerate(tables.items()):
            send_away(name, table, _fetch(self.servers, place), self._group.device)
        self.wired = Places(self.model)
        size = self.servers.traffic.table_bytes / 1e6
        self.notes = (f"{', '.join(sorted(apart))} ({size:.3g} MB) on servers, the rest on every trainer.",)

    def refresh(self) -> None:
        """Begin a turn with the servers."""
        for table in self._tables:
            check_unwritten(table)
        self.servers.turn += 1

    def synchronize(self) -> None:
        """Refuse to save or report what was written to the stand-ins of tables."""
        for table in self._tables:
            check_unwritten(table)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Begin a turn with the servers."""
        self.refresh()
        yield

    def update(self, optimize: Optimize, result: StepResult) -> None:
        """Commit the step on the servers, and update what is dense."""
        options = options_to_tell(self.optimizer)
        self.servers.apply(float(result.applied_factor), result.entry, result.norm, options)
        with _one_after_the_other(self.optimizer):
            optimize()
        self.servers.turn += 1

    def abandon(self) -> None:
        """Release the servers."""
        self.servers.close()


@contextlib.contextmanager
def _one_after_the_other(optimizer: Optimizer) -> Iterator[None]:
    """Have an update done as torch does it beside sparse gradients: by tensors alone; together they would round otherwise."""
    given = [(group, "foreach" in group, group.get("foreach")) for group in optimizer.param_groups]
    for group, *_ in given:
        group["foreach"] = False
    try:
        yield
    finally:
        for group, there, before in given:
            if there:
                group["foreach"] = before
            else:
                del group["foreach"]


class PushedRows:
    """Gradients that are rows of tables: the servers add them up."""

    def __init__(self, placement: DensePlacement) -> None:
        self._placement = placement

    def begin(self, weights: Sequence[nn.Parameter]) -> None:
        """Send nothing: all have the same already, servers included."""

    def combine(self, sums: TreeSum, step: StepState) -> None:  # noqa: ARG002
        """Push this trainer's."""
        self._placement.servers.push(sums.nodes)


class ServedRowsReducer(AroundReducer):
    """What is dense summed among the trainers; rows, and their norms, by the servers."""

    def __init__(self, placement: DensePlacement, inner: Reducer) -> None:
        super().__init__(inner)
        self._placement = placement
        self._asked = False

    def begin(self, work: StepWork) -> None:
        """Start a step."""
        super().begin(work)
        self._asked = False

    def finish(self) -> None:
        """Make `.grad` of what is dense hold the sums, and have the rows of the only trainer on their way."""
        super().finish()
        if self.world.size == 1:
            self._placement.servers.push([((0, self.step.shards), sparse.take(self.step.sparse))])

    def norm(self, held: Sequence[Tensor | None], *, wanted: bool) -> Tensor | None:  # noqa: ARG002
        """Wait until every server has everybody's rows; return the norm with those of the rows, which the servers know."""
        self._asked = True
        norms = self._placement.servers.norms()
        far = {id(one): row for one, row in zip(self.step.sparse, norms, strict=False)}
        measured = [far.get(id(one), one.grad) for one in self.step.parameters]
        return norm_of(measured) if wanted else None

    def refused(self, result: StepResult) -> None:
        """Report the refusal to the servers, which find the same and raise it too."""
        if not self._asked:
            self._placement.servers.norms()
        self._placement.servers.apply(1.0, result.entry, result.norm, [])


def _fetch(servers: Servers, table: int) -> Fetch:
    # A function, because a copy of the model shares it: the servers that a partial holds would be copied with it.
    return lambda numbers: servers.lookup(table, numbers)


def _bytes(*tensors: Tensor) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)

"""One process a device: torch's DistributedDataParallel, with sums where it takes means, in the order of one tree.

Bucketing, the order of buckets and the overlap with the backward pass are torch's. Two things are ours. The
reducer is armed just before the backward pass that ends a step, so the user's module is called bare, in any
way and any number of times, and earlier passes accumulate without a message. And the communication hook adds
along the canonical tree over the shards, so the bits are those of one process; the division by the weight of
the global batch comes later and once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.data import owned_shards
from paceline.errors import InputError
from paceline.reduce.combination import Combination
from paceline.reduce.compress import CompressedExchange, Span
from paceline.reduce.exchange import Exchange, Layout, SocketExchange, TorchExchange, over_sockets
from paceline.reduce.hosts import open_shared_memory
from paceline.reduce.packing import as_real, dense_strides, memory_shape, nothing_like
from paceline.reduce.tree import TreeSum
from paceline.strategies import compression, gradients, sparse
from paceline.strategies.base import Exactness, ShardWork, StepWork, StrategyInputs
from paceline.strategies.buffers import Rows as BufferRows
from paceline.strategies.buffers import gather_rows
from paceline.strategies.hooks import silenced
from paceline.strategies.result import StepResult
from paceline.strategies.sequential import SequentialReplica
from paceline.strategies.trained import check_equal, refuse_replaced
from paceline.strategies.tuning import Tuning
from paceline.strategies.writes import Writes
from paceline.world import World, all_gather_object
from paceline.world.fault_points import REDUCTION, hit
from paceline.world.status_page import Phase

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]


SHM_BUCKET_MB = 4
"""Buckets that stay in the last-level cache between copying in, adding and copying out."""
AUXILIARY_KEY = -1
COMMUNICATION = Phase.COMMUNICATION


class _Carried(nn.Module):
    """What DDP sees: the user's module and the ledger that rides along."""

    def __init__(self, model: nn.Module, ledger: nn.Parameter) -> None:
        super().__init__()
        self.model = model
        self.ledger = ledger


class DdpReplica(SequentialReplica):
    """One worker's model, wired to those of the others."""

    adapts = True
    holds_unsaved = True
    same_weights = True
    """Whether every worker of its group has all weights; those that leave some to servers say otherwise."""

    def __init__(self, parts: StrategyInputs, world: World) -> None:
        super().__init__(parts, world)
        self._find_unused_parameters = parts.find_unused_parameters
        self._equal = parts.exactness is Exactness.BITWISE and self.same_weights
        self._writes = Writes(self.model.named_parameters())
        self._walks = parts.find_unused_parameters
        """Whether the reducer walks the graph for parameters that a pass does not reach."""
        self._first_terms = False
        """Whether this is the first step with auxiliary terms."""
        self._compressed = parts.tuning.compress != "none"
        self._owned = owned_shards(world.rank, world.size, parts.shards, world.shares)
        self._combination = Combination(TreeSum(parts.shards), self._owned.start, self._owned, parts.shards)
        self._last_bucket_seen = False
        self.exchange = _open_exchange(parts, world)
        self._bucket_mb = _bucket_mb(parts.tuning, self.exchange)
        self._row_sums = TreeSum(parts.shards, sparse.add)
        """Gradients that are rows: they go past DDP."""
        self._ddp: DistributedDataParallel | None = None
        self._wire(agreed=parts.agreed)

    def _wire(self, *, agreed: bool) -> None:
        """Have torch's reducer sum what trains now; without a message where all workers are known to hold the same weights."""
        self._places = {id(parameter): place for place, parameter in enumerate(self.tracked)}
        carried = _Carried(self.model, self.ledger)
        if self.sparse:
            self._leave_rows_out(carried, agreed=agreed)
        self._ddp = None  # the hooks of the reducer before go with it
        self._ddp = DistributedDataParallel(
            carried,
            process_group=self.world.comm.group,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._walks,
            init_sync=not agreed,
            bucket_cap_mb=self._bucket_mb,
        )
        self._ddp.register_comm_hook(self, _sum_bucket)

    def _rewire(self) -> None:
        """Have another reducer, for what trains now."""
        if self._compressed:
            self.trained.check("--compress")  # it remembers what it left out, by the place of a parameter
        super()._rewire()
        self.auxiliary.settled = (
            False  # a term may be all that reaches what has begun to train: look once more
        )
        self._writes = Writes(self.model.named_parameters())
        self._wire(agreed=True)

    def _check_unchanged(self) -> None:
        """Refuse weights that the passes of this step wrote to, too: each worker's samples did so on their own."""
        super()._check_unchanged()
        self._writes.check(self._work.number)

    def _leave_rows_out(self, carried: nn.Module, *, agreed: bool) -> None:
        apart = {id(parameter) for parameter in self.sparse}
        names = [name for name, one in carried.named_parameters(remove_duplicate=False) if id(one) in apart]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(carried, names)  # type: ignore[no-untyped-call]  # noqa: SLF001
        if not agreed:
            for parameter in self.sparse:
                parameter.data.copy_(self.world.comm.broadcast(parameter.data))

    def begin(self, work: StepWork) -> None:
        """Start a step with no gradients."""
        super().begin(work)
        self._writes.begin()
        if self.sparse:
            self._row_sums = TreeSum(self._shards, sparse.add)

    def _reduces_now(self) -> bool:
        """Agree on the terms of the loss before the first reduction: with some, it comes after this pass, by another reducer."""
        return self.auxiliary.settled or not self._agree_on_terms()

    def _arm(self, roots: list[Tensor], last: int | None) -> None:
        """Let the coming backward pass reduce: what DDP.forward does, without going through it."""
        if self._tree.nodes or not self._combination.trivial:
            self._combination = Combination(self._tree, last, self._owned, self._shards)
        if self._ddp is None:
            raise RuntimeError("a step in a group that is gone")
        reducer = self._ddp.reducer
        reducer._rebuild_buckets()  # noqa: SLF001  (DDP.forward calls it just here)
        reducer.prepare_for_forward()
        if self._walks:
            self._hold_places()
        # A leaf has no graph in which the reducer would find it; a view of it has.
        walked = [root.view_as(root) if root.is_leaf else root for root in roots] if self._walks else []
        reducer.prepare_for_backward(walked)
        self._last_bucket_seen = False

    def _hold_places(self) -> None:
        """Add a gradient to parameters that an earlier pass of this step had one for: the reducer asks for it."""
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is None and any(held[place] is not None for _, held in self._tree.nodes):
                parameter.grad = nothing_like(parameter)

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Add a bucket up over all workers, together with the shards that this worker finished before."""
        buffer: Tensor = bucket.buffer()
        if self._walks:
            for parameter, view in zip(bucket.parameters(), _views(bucket), strict=True):
                if parameter.grad is None:
                    view.fill_(-0.0)  # torch puts 0.0 there, which is not nothing
        parts = [buffer] if self._combination.trivial else self._parts(bucket, buffer)
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else []
        )
        if isinstance(self.exchange, CompressedExchange):
            self.exchange.lay_out(bucket.index(), self._spans(bucket, buffer))
        before = self.world.pulse.enter(COMMUNICATION)  # an exchange without room left waits for the others
        self.exchange.start(bucket.index(), parts, buffer, lambda: future.set_result(buffer))
        if bucket.is_last():
            self._last_bucket_seen = True
            hit(REDUCTION)
            self.exchange.finish()
        self.world.pulse.enter(before)
        return future

    def _parts(self, bucket: GradBucket, buffer: Tensor) -> list[Tensor]:
        places = [self._places[id(parameter)] for parameter in bucket.parameters()]
        return self._combination.parts(_views(bucket), buffer, places)

    def _spans(self, bucket: GradBucket, buffer: Tensor) -> list[Span]:
        start = buffer.storage_offset()
        return [
            Span(
                int(view.storage_offset() - start),
                memory_shape(view),
                self._places[id(parameter)],
                parameter is self.ledger,
            )
            for view, parameter in zip(_views(bucket), bucket.parameters(), strict=True)
        ]

    def _combined(self) -> None:
        """Refuse to go on with gradients that were never reduced."""
        if not self._last_bucket_seen:
            self._check_unchanged()
            known = {id(parameter) for parameter in self.parameters}
            apart = {id(parameter) for parameter in self.sparse}
            named = [(name, one) for name, one in self.model.named_parameters() if one.requires_grad]
            replaced = [name for name, one in named if id(one) not in known]
            unused = [name for name, one in named if one.grad is None and id(one) not in apart]
            if replaced or not unused:
                refuse_replaced(replaced[0] if replaced else "a parameter of the model")
            self._refuse(unused, "main loss" if self.auxiliary.names else "loss")

    def _refuse(self, unused: list[str], loss: str = "loss") -> None:
        raise InputError(
            f"no gradient for {', '.join(unused[:5])} on rank {self.world.rank}: this step's {loss} does not depend on it. "
            "If that is meant, set find_unused_parameters = True in the task, or give it to paceline.launch."
        )

    def settle(self) -> None:
        """Refuse to save or report weights in which the workers have parted, however that came about."""
        if self._equal:
            check_equal([*self.model.named_parameters(), *self.model.named_buffers()], self.world)

    def abandon(self) -> None:
        """Let go of the reducer: its hooks on the parameters would answer to the next backward pass too.

        It holds this replica through torch's C++ side, where no garbage collector sees the circle.
        """
        super().abandon()
        self._ddp = None
        self.exchange = None  # type: ignore[assignment]

    def _close_shard(self, work: ShardWork) -> None:
        """Keep a finished shard's gradients; the last one's have gone out to the others already."""
        if self.sparse:
            self._row_sums.add((work.index, work.index + 1), sparse.take(self.sparse))
        if not self._sent:
            super()._close_shard(work)

    def _finish_combination(self) -> None:
        """Take part with what there is when this worker had no sample, or its loop left some out."""
        if not self._sent:
            self._sent = True
            if not self.auxiliary.settled:
                self._agree_on_terms()
            if self._first_terms and self.auxiliary.names:
                self._look_for_bare()
            roots = self._roots()
            self._arm(roots, None)
            with silenced(roots):
                gradients.run_backward(roots, [nothing_like(root) for root in roots])
            self._combined()
        if self.auxiliary.names:
            self._combine_auxiliary()
        if self.sparse:
            self._combine_rows()

    def _roots(self) -> list[Tensor]:
        """Return what a pass without a loss starts from: where parameters may go unused, those that had a gradient before."""
        apart = {id(parameter) for parameter in self.sparse}
        return [
            one
            for place, one in enumerate(self.tracked)
            if id(one) not in apart
            and (
                not self._walks
                or one is self.ledger
                or any(held[place] is not None for _, held in self._tree.nodes)
            )
        ]

    def _combine_rows(self) -> None:
        """Have everybody's rows, added along the tree: they are few, so each sends its own to all."""
        summed = sparse.gather(self.world, self._shards, self._row_sums.nodes, self.sparse)
        for parameter, gradient in zip(self.sparse, summed, strict=False):
            parameter.grad = gradient

    def _agree_on_terms(self) -> bool:
        """Ask in the first step, and when what trains has changed; return whether there are any terms.

        A worker without a sample has seen none yet.
        """
        names = all_gather_object(self.world.comm, self.auxiliary.names)
        self.auxiliary.names = max(names, key=len)
        self.auxiliary.settled = self._first_terms = True
        return bool(self.auxiliary.names)

    def _look_for_bare(self) -> None:
        """Have a reducer that does not wait for parameters which only an auxiliary term reaches, where there are some.

        Done when the gradients of the step lie in the tree: a new reducer takes hold of those that lie in `.grad`.
        """
        self._first_terms = False
        places = range(len(self.parameters))
        held = [node for _, node in self._tree.nodes if any(one is not None for one in node)]
        mine = [place for place in places if held and any(node[place] is None for node in held)]
        if any(all_gather_object(self.world.comm, mine)) and not self._walks:
            self._walks = True
            self._wire(agreed=True)

    def _combine_auxiliary(self) -> None:
        """Send the auxiliary terms the same way, as one flat tensor of each type."""
        behind, auxiliary = len(self.tracked), self.auxiliary
        packing = auxiliary.packing()
        mine = auxiliary.take()
        earlier = [held[behind:] for held in self._combination.into_live]
        nodes = [(held[behind:] if held is not None else [], live) for held, live in self._combination.nodes]
        doubtful = auxiliary.doubtful([mine, *earlier, *(held for held, _ in nodes)])
        live = packing.pack(mine)
        for held in earlier:
            torch._foreach_add_(live, packing.pack(held))
        packed = [live if is_live else packing.pack(held) for held, is_live in nodes]
        for place, target in enumerate(live):
            self.exchange.start(AUXILIARY_KEY - place, [part[place] for part in packed], target, lambda: None)
        self.exchange.finish()
        auxiliary.give(packing.unpack(live, doubtful))
        self._check_reached()

    def _check_reached(self) -> None:
        """Refuse a parameter that no term of anybody's loss reaches, unless the task says that this may be."""
        places = [] if self._find_unused_parameters else self.auxiliary.unreached()
        if places:
            names = {id(value): name for name, value in self.model.named_parameters()}
            self._refuse([names[id(self.parameters[place])] for place in places])

    def _result(self, entry: Tensor) -> StepResult:
        """Return what the step came to, apart from its bucket: the next step writes there, and torch lays buckets out anew."""
        return super()._result(entry.clone())

    def _agree_on_buffers(self, names: list[str]) -> list[str]:
        every = {name for part in all_gather_object(self.world.comm, names) for name in part}
        return [name for name, _ in self.model.named_buffers() if name in every]

    def _gather_buffers(self, rows: BufferRows) -> BufferRows:
        return gather_rows(rows, self.buffers.like(), self.world, self._shards)


def _open_exchange(parts: StrategyInputs, world: World) -> Exchange:
    """Choose how sums travel; all workers choose alike."""
    if parts.tuning.compress != "none":
        return compression.open_compressed(parts, world)
    if parts.exactness is not Exactness.BITWISE:
        return TorchExchange(world.comm)
    made = open_shared_memory(world, parts.shards) if parts.transport != "gloo" else None
    if made is not None:
        return made
    if parts.transport == "shm":
        raise InputError(
            "--transport shm needs CPU workers on Linux hosts (x86-64 or aarch64), as many on each. Use --transport gloo."
        )
    world.note_transport()
    return over_sockets(world.comm, Layout.of_workers(world, parts.shards))


def _bucket_mb(tuning: Tuning, exchange: Exchange) -> float | None:
    if tuning.bucket_mb is not None:
        return tuning.bucket_mb
    over_sockets = isinstance(exchange, TorchExchange | SocketExchange | CompressedExchange)
    return None if over_sockets else SHM_BUCKET_MB


def _views(bucket: GradBucket) -> list[Tensor]:
    """Return each parameter's part of a bucket, as real numbers, in the order of memory that the parameter has.

    Two things torch (2.11 to 2.13) tells otherwise than it lays them out: its views have contiguous strides where a dense
    parameter has others (channels_last, a transposed weight), and the offsets of complex ones are counted in complex numbers.
    """
    views: list[Tensor] = bucket.gradients()
    parameters: list[Tensor] = bucket.parameters()
    is_complex = parameters[0].is_complex()
    if not is_complex and all(one.is_contiguous() for one in parameters):
        return views
    buffer: Tensor = bucket.buffer()
    whole = torch.view_as_complex(buffer.view(-1, 2)) if is_complex else buffer
    start, here = buffer.storage_offset(), whole.storage_offset()
    return [
        as_real(
            whole.as_strided(view.shape, dense_strides(parameter), here + int(view.storage_offset()) - start)
        )
        for view, parameter in zip(views, parameters, strict=True)
    ]


def _sum_bucket(replica: DdpReplica, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Hand a bucket to its replica. (torch finds the arguments by name: `bucket` must be called so.)"""
    return replica.reduce(bucket)


# torch compares the annotations of a hook with types, and ours are text.
_sum_bucket.__annotations__.clear()

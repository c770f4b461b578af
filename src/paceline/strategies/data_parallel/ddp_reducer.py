"""One process a device: torch's DistributedDataParallel, with sums where it takes means, in the order of one tree.

Bucketing, the order of buckets and the overlap with the backward pass are torch's. Two things are ours. The
reducer is armed just before the backward pass that ends a step, so the user's module is called bare, in any
way and any number of times, and earlier passes accumulate without a message. And the communication hook adds
along the canonical tree over the shards, so the bits are those of one process; the division by the weight of
the global batch comes later and once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.compat import ddp, foreach
from paceline.compat.autograd import run_backward
from paceline.data import owned_shards
from paceline.errors import InputError
from paceline.reduce.combination import Combination
from paceline.reduce.compress import CompressedExchange, Span
from paceline.reduce.exchange import Exchange, SocketExchange, TorchExchange
from paceline.reduce.hosts import HostsExchange
from paceline.reduce.packing import as_real, dense_strides, memory_shape, nothing_like
from paceline.reduce.post_backward import open_exchange
from paceline.reduce.shared_memory import SharedMemoryExchange
from paceline.reduce.tree import TreeSum
from paceline.strategies import compression, sparse
from paceline.strategies.base import Exactness, StepWork, StrategyInputs
from paceline.strategies.data_parallel.own_sums import OwnSums
from paceline.strategies.guards.hooks import silenced
from paceline.strategies.guards.places import refuse_replaced
from paceline.strategies.placement import spread_weights
from paceline.strategies.reducer import Reducer, agree_on_terms
from paceline.strategies.step_state import StepState
from paceline.strategies.tuning import Tuning
from paceline.task import Loss
from paceline.world import World, all_gather_object, spans
from paceline.world.fault_points import REDUCTION, hit
from paceline.world.status_page import Phase

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]


SHM_BUCKET_MB = 4
"""Buckets that stay in the last-level cache between copying in, adding and copying out."""
AUXILIARY_KEY = -1
COMMUNICATION = Phase.COMMUNICATION


class _Carried(nn.Module):
    """What DDP sees: the user's module and the loss statistics that ride along."""

    def __init__(self, model: nn.Module, loss_stats: nn.Parameter) -> None:
        super().__init__()
        self.model = model
        self.loss_stats = loss_stats


class _Wiring(NamedTuple):
    """What belongs to one step state."""

    ddp: DistributedDataParallel
    places: dict[int, int]
    walks: bool
    first_terms: bool
    own: OwnSums


class RowsExchange(Protocol):
    """Takes gradients that are rows of tables past DDP."""

    def begin(self, weights: Sequence[nn.Parameter]) -> None:
        """Have the same tables everywhere."""

    def combine(self, sums: TreeSum, step: StepState) -> None:
        """Bring everybody's rows together."""


class GatheredRows:
    """Gradients that are rows of tables: they are few, so each worker sends its own to all."""

    def __init__(self, world: World) -> None:
        self._world = world

    def begin(self, weights: Sequence[nn.Parameter]) -> None:
        """Have the first worker's tables."""
        spread_weights(weights, self._world)

    def combine(self, sums: TreeSum, step: StepState) -> None:
        """Make `.grad` everybody's rows, added along the tree."""
        summed = sparse.gather(self._world, step.shards, sums.nodes, step.sparse)
        for parameter, gradient in zip(step.sparse, summed, strict=False):
            parameter.grad = gradient


class DdpReducer(Reducer):
    """One worker's gradients, summed with those of the others."""

    watches = True

    def __init__(self, inputs: StrategyInputs, world: World, rows: RowsExchange | None = None) -> None:
        """`rows` takes what goes past DDP: gradients that are rows."""
        super().__init__(world)
        self._rows: RowsExchange = GatheredRows(world) if rows is None else rows
        self._find_unused_parameters = inputs.find_unused_parameters
        self._walks = inputs.find_unused_parameters
        """Whether DDP's reducer walks the graph for parameters that a pass does not reach."""
        self._first_terms = False
        """Whether this is the first step with auxiliary terms."""
        self._compress = inputs.tuning.compress
        self._shards = inputs.shards
        self._owned = owned_shards(world.rank, world.size, inputs.shards, world.shares)
        self._combination = Combination(TreeSum(inputs.shards), self._owned.start, self._owned, inputs.shards)
        self._last_bucket_seen = False
        self.exchange = _open_exchange(inputs, world)
        self._bucket_mb = _bucket_mb(inputs.tuning, self.exchange)
        self._row_sums = TreeSum(inputs.shards, sparse.add)
        self._own = OwnSums()
        self._in_buckets: list[nn.Parameter] = []
        """Those whose sums are where torch's reducer writes those of the next step."""
        self._ddp: DistributedDataParallel | None = None
        self._places: dict[int, int] = {}
        self._wirings: dict[int, _Wiring] = {}
        """Those of other turns, by step state."""
        self._agreed = inputs.weights_in_sync
        """Whether all workers are known to hold the same weights."""

    def wire(self, step: StepState) -> None:
        """Have a reducer for what trains now."""
        if self._ddp is not None:
            if self._compress != "none":
                step.trained.check("--compress")  # it remembers what it left out, by the place of a parameter
            # A term may be all that reaches what has begun to train: look once more.
            step.auxiliary.agreed = False
        super().wire(step)
        self._wire()

    def switch(self, step: StepState) -> None:
        """Go on with torch's reducer of another turn; that of all which trains is given up, with its memory."""
        if self.step.mine is not None and self._ddp is not None:
            self._wirings[id(self.step)] = _Wiring(
                self._ddp, self._places, self._walks, self._first_terms, self._own
            )
        self._ddp, self.step = None, step
        known = self._wirings.pop(id(step), None)
        if known is not None:
            self._ddp, self._places, self._walks, self._first_terms, self._own = known
        else:
            self._walks, self._first_terms = self._find_unused_parameters, False
            self._wire()

    def _wire(self) -> None:
        """Have torch's reducer sum what trains now; without a message where all workers are known to hold the same weights."""
        step = self.step
        self._places = {id(parameter): place for place, parameter in enumerate(step.tracked)}
        carried = _Carried(step.model, step.loss_stats)
        self._leave_out(carried)
        self._own = OwnSums()
        self._ddp = None  # the hooks of the reducer before go with it
        self._ddp = DistributedDataParallel(
            carried,
            process_group=self.world.comm.group,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._walks,
            init_sync=not self._agreed,
            bucket_cap_mb=self._bucket_mb,
        )
        self._ddp.register_comm_hook(self, DdpReducer.reduce)
        self._agreed = True

    def _leave_out(self, carried: nn.Module) -> None:
        """Take past DDP what goes another way, rows of tables, has no turn, or is of a type that DDP cannot send."""
        named = list(carried.named_parameters(remove_duplicate=False))
        apart = {id(parameter) for parameter in self.step.sparse}
        if self.step.mine is not None:
            apart |= {id(one) for _, one in named} - set(map(id, self.step.tracked))
        every = [*named, *carried.named_buffers(remove_duplicate=False)]
        odd = {id(one): one for _, one in every if id(one) not in apart and not ddp.can_send(one)}
        names = [name for name, one in every if id(one) in apart or id(one) in odd]
        if names:
            ddp.leave_out(carried, names)
        if not self._agreed:
            spread_weights(odd.values(), self.world)
            if self.step.sparse:
                self._rows.begin(self.step.sparse)

    def begin(self, work: StepWork) -> None:  # noqa: ARG002
        """Start a step with nothing sent."""
        self.sent = False
        if self.step.sparse:
            self._row_sums = TreeSum(self._shards, sparse.add)

    def backward(self, loss: Loss) -> None:
        """Add one batch's gradients; those of the step's last pass go out while it goes on."""
        step = self.step
        if loss.auxiliary:
            step.auxiliary.backward(loss.auxiliary, step.start, step.work.size)
        roots = (loss.total, step.loss_stats)
        # With auxiliary terms the first reduction comes after this pass, by another reducer.
        self.sent = step.left == 0 and (step.auxiliary.agreed or not self._agree_on_terms())
        if self.sent:
            self._arm(roots, step.open)
        run_backward(roots, step.starts(loss))
        if self.sent:
            self._take_sums()

    def _arm(self, roots: tuple[Tensor, ...], last: int | None) -> None:
        """Let the coming backward pass reduce: what DDP.forward does, without going through it."""
        if self.step.tree.nodes or not self._combination.trivial:
            self._combination = Combination(self.step.tree, last, self._owned, self._shards)
        if self._ddp is None:
            raise RuntimeError("a step in a group that is gone")
        reducer = self._ddp.reducer
        ddp.rebuild_buckets(reducer)  # DDP.forward calls it just here
        reducer.prepare_for_forward()
        if self._walks:
            self._hold_places()
        # A leaf has no graph in which the reducer would find it; a view of it has.
        walked = [root.view_as(root) if root.is_leaf else root for root in roots] if self._walks else []
        reducer.prepare_for_backward(walked)
        self._last_bucket_seen = False
        self._own.begin()

    def _hold_places(self) -> None:
        """Set a zero gradient for parameters that had one in an earlier pass of this step: DDP's reducer expects it."""
        for place, parameter in enumerate(self.step.parameters):
            if parameter.grad is None and any(held[place] is not None for _, held in self.step.tree.nodes):
                parameter.grad = nothing_like(parameter)

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Add a bucket up over all workers, together with the shards that this worker finished before; torch calls it."""
        buffer: Tensor = bucket.buffer()
        if self._walks:
            for parameter, view in zip(bucket.parameters(), _views(bucket), strict=True):
                if parameter.grad is None:
                    view.fill_(-0.0)  # torch puts 0.0 there, which is not nothing
        parts = [buffer] if self._combination.trivial else self._parts(bucket, buffer)
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else []
        )
        if self._compress != "none" and isinstance(self.exchange, CompressedExchange):
            self.exchange.lay_out(bucket.index(), self._spans(bucket, buffer))
        # An exchange without room left waits for the others.
        before = self.world.status_page.enter(COMMUNICATION)
        with spans.of[spans.REDUCTION]:
            target = self._own.target(bucket.index(), buffer) if self._stays_apart(buffer) else buffer
            self.exchange.start(bucket.index(), parts, target, partial(future.set_result, buffer))
            if bucket.is_last():
                self._last_bucket_seen = True
                hit(REDUCTION)
                self.exchange.finish()
        self.world.status_page.enter(before)
        return future

    def _stays_apart(self, buffer: Tensor) -> bool:
        """Return whether totals go to memory of their own, which costs nothing in an exchange that copies them out anyway."""
        apart = isinstance(self.exchange, SharedMemoryExchange | HostsExchange | SocketExchange)
        return apart and not buffer.is_cuda

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
                parameter is self.step.loss_stats,
            )
            for view, parameter in zip(_views(bucket), bucket.parameters(), strict=True)
        ]

    def _take_sums(self) -> None:
        """Take the sums out of the reducer's buckets, where the next step writes and somebody may keep them."""
        if not self._last_bucket_seen:
            self._refuse_unreduced()
        self._in_buckets = []
        for one in self.step.tracked:
            total = None if one.grad is None else self._own.total(one.grad)
            if total is not None:
                one.grad = total
            elif one.grad is not None:
                self._in_buckets.append(one)
        if not self._in_buckets:
            return
        stats = self.step.loss_stats
        if self.may_be_kept():
            self.give_up_sums()
        elif stats.grad is not None:
            stats.grad = stats.grad.clone()  # it is read a step later

    def give_up_sums(self) -> None:
        """Copy the sums that still lie in the reducer's buckets, all at once: on a GPU each alone would be a kernel."""
        held = [one for one in self._in_buckets if one.grad is not None and not one.grad.is_sparse]
        sums = [one.grad for one in held if one.grad is not None]
        copies = list(map(torch.empty_like, sums))
        if copies:
            foreach.copy_(copies, sums)
        for one, total in zip(held, copies, strict=True):
            one.grad = total
        self._in_buckets = []

    def _refuse_unreduced(self) -> NoReturn:
        """Refuse to go on with gradients that were never reduced."""
        step = self.step
        step.check_unchanged()
        known = {id(parameter) for parameter in step.parameters}
        apart = {id(parameter) for parameter in step.sparse}
        part = step.model if step.mine is None else step.mine
        named = [(name, one) for name, one in part.named_parameters() if one.requires_grad]
        replaced = [name for name, one in named if id(one) not in known]
        unused = [name for name, one in named if one.grad is None and id(one) not in apart]
        if replaced or not unused:
            refuse_replaced(replaced[0] if replaced else "a parameter of the model")
        self._refuse(unused, "main loss" if step.auxiliary.names else "loss")

    def _refuse(self, unused: list[str], loss: str = "loss") -> NoReturn:
        raise InputError(
            f"no gradient for {', '.join(unused[:5])} on rank {self.world.rank}: this step's {loss} does not depend on it. "
            "If that is meant, set find_unused_parameters = True in the task, or give it to paceline.launch."
        )

    def abandon(self) -> None:
        """Release DDP's reducer: its hooks on the parameters would answer to the next backward pass too.

        It holds this one through torch's C++ side, where no garbage collector sees the circle.
        """
        self._ddp = None
        self._wirings.clear()
        self.exchange = None  # type: ignore[assignment]

    def close_shard(self, index: int) -> None:
        """Keep a finished shard's gradients; the last one's have gone out to the others already."""
        if self.step.sparse:
            self._row_sums.add((index, index + 1), sparse.take(self.step.sparse))
        if not self.sent:
            super().close_shard(index)

    def finish(self) -> None:
        """Take part with what there is when this worker had no sample, or its loop left some out."""
        if not self.sent:
            self.sent = True
            if not self.step.auxiliary.agreed:
                self._agree_on_terms()
            if self._first_terms and self.step.auxiliary.names:
                self._look_for_bare()
            roots = self._roots()
            self._arm(roots, None)
            with silenced(roots):
                run_backward(roots, tuple(map(nothing_like, roots)))
            self._take_sums()
        if self.step.auxiliary.names:
            self._combine_auxiliary()
        if self.step.sparse:
            self._rows.combine(self._row_sums, self.step)

    def _roots(self) -> tuple[Tensor, ...]:
        """Return what a pass without a loss starts from: where parameters may go unused, those that had a gradient before."""
        step = self.step
        apart = {id(parameter) for parameter in step.sparse}
        return tuple(
            one
            for place, one in enumerate(step.tracked)
            if id(one) not in apart
            and (
                not self._walks
                or one is step.loss_stats
                or any(held[place] is not None for _, held in step.tree.nodes)
            )
        )

    def _agree_on_terms(self) -> bool:
        """Ask in the first step, and when what trains has changed; return whether there are any terms."""
        agree_on_terms(self.world, self.step)
        self._first_terms = True
        return bool(self.step.auxiliary.names)

    def _look_for_bare(self) -> None:
        """Have a reducer that does not wait for parameters which only an auxiliary term reaches, where there are some.

        Done when the gradients of the step lie in the tree: a new reducer takes hold of those that lie in `.grad`.
        """
        self._first_terms = False
        places = range(len(self.step.parameters))
        held = [node for _, node in self.step.tree.nodes if any(one is not None for one in node)]
        mine = [place for place in places if held and any(node[place] is None for node in held)]
        if any(all_gather_object(self.world.comm, mine)) and not self._walks:
            self._walks = True
            self._wire()

    def _combine_auxiliary(self) -> None:
        """Send the auxiliary terms the same way, as one flat tensor of each type."""
        behind, auxiliary = len(self.step.tracked), self.step.auxiliary
        packing = auxiliary.packing()
        mine = auxiliary.take()
        earlier = [held[behind:] for held in self._combination.into_live]
        nodes = [(held[behind:] if held is not None else [], live) for held, live in self._combination.nodes]
        doubtful = auxiliary.doubtful([mine, *earlier, *(held for held, _ in nodes)])
        live = packing.pack(mine)
        for held in earlier:
            foreach.add_(live, packing.pack(held))
        packed = [live if is_live else packing.pack(held) for held, is_live in nodes]
        for place, target in enumerate(live):
            self.exchange.start(AUXILIARY_KEY - place, [part[place] for part in packed], target, lambda: None)
        self.exchange.finish()
        auxiliary.give(packing.unpack(live, doubtful))
        self._check_reached()

    def _check_reached(self) -> None:
        """Refuse a parameter that no term of anybody's loss reaches, unless the task says that this may be."""
        places = [] if self._find_unused_parameters else self.step.auxiliary.unreached()
        if places:
            names = {id(value): name for name, value in self.step.model.named_parameters()}
            self._refuse([names[id(self.step.parameters[place])] for place in places])


def _open_exchange(inputs: StrategyInputs, world: World) -> Exchange:
    """Choose how sums travel; all workers choose alike."""
    if inputs.tuning.compress != "none":
        return compression.open_compressed(inputs, world)
    if inputs.exactness is not Exactness.BITWISE:
        return TorchExchange(world.comm)
    return open_exchange(world, inputs.shards, inputs.transport)


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


# torch compares the annotations of a hook with types, and ours are text.
DdpReducer.reduce.__annotations__.clear()

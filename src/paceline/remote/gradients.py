"""What workers know of a pass whose gradients cross them: the tensors that went from one to another, and the gradients so far.

A call inside a pass cuts the graph: its arguments arrive as leaves, and its answer as the outputs of one autograd function. Going
back through that function sends the gradients of the answer to the worker that made it, which goes back through its own part,
keeps the gradients of its own parameters, and returns those of the arguments.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.errors import RemoteError
from paceline.remote.exchange import BACKWARD, END_PASS, MessageExchange
from paceline.remote.object_store import Number
from paceline.remote.pending import Lift
from paceline.transport.values import moved

_RANK_BITS = 40
"""The number of a pass holds the rank of the worker that opened it, and that worker's count."""
_REMEMBERED = 4096
"""So many passes that have ended are known to have: a call of one may still be on its way."""
_PATIENCE_S = 24 * 3600.0
"""For going back, which takes as long as the workers behind take; of a lost one everybody hears."""
_ANSWERED, _SENT = 0, 1
"""Which tensors of a call gradients are for: those of its answer, or of its arguments."""
_active = threading.local()


class Context:
    """One pass on one worker."""

    def __init__(self, identity: int, exchange: MessageExchange) -> None:
        self.identity, self.exchange = identity, exchange
        self.gradients: dict[Tensor, Tensor] = {}
        """Of this worker's own parameters."""
        self.called: set[str] = set()
        self._tensors: dict[tuple[int, Number], list[Tensor]] = {}
        self._arrived: dict[int, tuple[Tensor, str, Number, int]] = {}
        self._lock = threading.Lock()

    def departure(self, worker: str, count: int, leaves: list[Tensor]) -> Lift:
        """Note which tensors go to a worker in a call; returns what takes those of its answer."""
        self.called.add(worker)
        if leaves:
            self._tensors[_SENT, (self.exchange.rank, count)] = leaves
        return Crossing(self, worker, count, leaves).lift

    def arrival(
        self, caller: str, number: Number, received: list[Tensor], devices: list[str | None]
    ) -> list[Tensor]:
        """Make leaves of the tensors that came with a call."""
        found = [moved(one, device).requires_grad_() for one, device in zip(received, devices, strict=True)]
        for place, one in enumerate(found):
            self._arrived[id(one)] = one, caller, number, place
        return found

    def made(self, number: Number, leaves: list[Tensor]) -> None:
        """Note the tensors of an answer."""
        if leaves:
            self._tensors[_ANSWERED, number] = leaves

    def back(
        self,
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        *,
        call: Number | None = None,
        retain: bool = True,
    ) -> list[Tensor | None]:
        """Go back from some tensors; returns the gradients of those that arrived with a call, and sends on those of others."""
        ends = [
            (one, given.to(one.device))
            for one, given in zip(tensors, gradients, strict=True)
            if given is not None
        ]
        leaves = _leaves([one for one, _ in ends])
        if not leaves:
            return []
        found = torch.autograd.grad(
            [one for one, _ in ends],
            leaves,
            [given for _, given in ends],
            retain_graph=retain,
            allow_unused=True,
        )
        onward: dict[tuple[str, Number], dict[int, Tensor]] = defaultdict(dict)
        for leaf, gradient in zip(leaves, found, strict=True):
            if gradient is None:
                continue
            _, caller, number, place = self._arrived.get(id(leaf), (None, "", None, 0))
            if number is None:
                with self._lock:
                    before = self.gradients.get(leaf)
                    self.gradients[leaf] = gradient if before is None else before + gradient
            else:
                onward[caller, number][place] = gradient
        mine = next((key for key in onward if key[1] == call), None)
        returned = onward.pop(mine) if mine is not None else {}
        for (caller, number), some in onward.items():
            self.send_back(caller, _SENT, number, _listed(some))
        return _listed(returned)

    def send_back(
        self, worker: str, side: int, number: Number, gradients: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Have a worker go back from tensors of a call; returns the gradients of its arguments."""
        value = [self.identity, side, *number, gradients]
        asked = self.exchange.request(worker, BACKWARD, value, what="backward", timeout_s=_PATIENCE_S)
        found: list[Tensor | None] = asked.wait()
        return found

    def tensors(self, side: int, number: Number) -> list[Tensor]:
        """Return the tensors of a call."""
        found = self._tensors.get((side, number))
        if found is None:
            raise RemoteError(
                f"{self.exchange.name} knows nothing of what gradients came for: the pass has ended there."
            )
        return found

    def clear(self) -> None:
        """Let go of everything."""
        self.gradients.clear()
        self._tensors.clear()
        self._arrived.clear()

    @property
    def may_come_again(self) -> bool:
        """Whether other workers may have gradients for tensors of this one, which keeps their graph needed."""
        return any(side == _SENT for side, _ in self._tensors)


class Crossing:
    """One call inside a pass, for the worker that made it."""

    def __init__(self, context: Context, worker: str, count: int, inputs: list[Tensor]) -> None:
        self._context, self._worker, self._count, self._inputs = context, worker, count, inputs

    def lift(self, received: list[Tensor], devices: list[str | None]) -> list[Tensor]:
        """Make the answer's tensors outputs of a function of the call's arguments."""
        # Where no argument requires gradients, the answer does: of parameters over there.
        inputs = self._inputs or [torch.empty(0, requires_grad=True)]
        made = _Function.apply(self, received, *inputs)  # type: ignore[no-untyped-call]
        return [moved(one, device) for one, device in zip(made, devices, strict=True)]

    def back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the arguments."""
        number = (self._context.exchange.rank, self._count)
        found = self._context.send_back(self._worker, _ANSWERED, number, list(gradients))
        found += [None] * (len(self._inputs) - len(found))
        return [
            None if one is None else one.to(given.device)
            for one, given in zip(found, self._inputs, strict=True)
        ] or [None]


class _Function(torch.autograd.Function):
    """A call, as autograd sees it. Its outputs are in host memory, so going back never blocks a device's thread."""

    @staticmethod
    def forward(ctx: Any, crossing: Crossing, received: list[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.crossing = crossing
        ctx.set_materialize_grads(False)
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *ctx.crossing.back(gradients))


class Passes:
    """The passes that this worker takes part in."""

    def __init__(self, exchange: MessageExchange) -> None:
        self._exchange = exchange
        self._open: dict[int, Context] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._counts = itertools.count(1)
        self._lock = threading.Lock()

    def begin(self) -> Context:
        """Open a pass."""
        found = self.find((self._exchange.rank << _RANK_BITS) + next(self._counts))
        assert found is not None  # noqa: S101  (nobody has ended it yet)
        return found

    def find(self, identity: int | None) -> Context | None:
        """Return a pass by its number, which this worker may not have heard of yet; None where there is none, or it has ended."""
        if identity is None:
            return None
        with self._lock:
            if identity in self._ended:
                return None
            return self._open.setdefault(identity, Context(identity, self._exchange))

    def go_back(
        self, identity: int, side: int, number: Number, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Go back from tensors of a call for the worker that has their gradients; returns those of its arguments."""
        context = self.find(identity)
        if context is None:
            raise RemoteError("gradients came for a pass that has ended.")
        call = number if side == _ANSWERED else None
        return context.back(context.tensors(side, number), gradients, call=call)

    def end(self, identity: int) -> None:
        """Forget a pass, here and on every worker that was called in it."""
        with self._lock:
            context = self._open.pop(identity, None)
            self._ended[identity] = None
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        for worker in sorted(context.called) if context is not None else ():
            self._exchange.post(worker, END_PASS, identity)
        if context is not None:
            # With its graphs goes much, which others need not wait for.
            self._exchange.pool.submit(context.clear)

    def end_of(self, worker: str) -> None:
        """Forget the passes of a worker that is lost."""
        rank = self._exchange.ranks[worker]
        for identity in [one for one in list(self._open) if one >> _RANK_BITS == rank]:
            self.end(identity)


@contextmanager
def inside(context: Context | None) -> Iterator[None]:
    """Have the calls that this thread makes belong to a pass."""
    before = getattr(_active, "context", None)
    _active.context = context
    try:
        yield
    finally:
        _active.context = before


def active() -> Context | None:
    """Return the pass that calls of this thread belong to; none where nothing is remembered for a backward."""
    context: Context | None = getattr(_active, "context", None)
    return context if context is not None and torch.is_grad_enabled() else None


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that some tensors were computed from."""
    found: dict[int, Tensor] = {}
    seen: set[Any] = set()
    waiting: list[Any] = []
    for one in tensors:
        if one.grad_fn is not None:
            waiting.append(one.grad_fn)
        elif one.requires_grad:
            found[id(one)] = one
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        waiting += [following for following, _ in node.next_functions if following is not None]
    return list(found.values())


def _listed(found: dict[int, Tensor]) -> list[Tensor | None]:
    return [found.get(place) for place in range(max(found, default=-1) + 1)]

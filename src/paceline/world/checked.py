"""`CheckedComm`: finds out before a collective whether all ranks mean the same one.

Gloo answers a wrong shape by killing a rank and a wrong reduce-op by a wrong number. With this wrapper all
ranks first exchange a fingerprint of fixed size (operation, shape, type, root, reduce-op, running number, and
the line of the caller); a mismatch raises the same `CollectiveMismatchError` on every rank, with a table of
who does what and where. It costs one small message for each operation, so it is for finding bugs. A rank that
sends while the others are in a collective is not found out: they wait until the timeout of the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from paceline.errors import PacelineError
from paceline.world import fingerprint
from paceline.world.base import Comm, Pending, PendingReduction, ReduceOp
from paceline.world.fingerprint import CollectiveCall, describe


class CheckedComm(Comm):
    """Wraps any `Comm`; everybody in the group must wrap it, at the same time."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._number = 0
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._last: dict[int, _CheckedReceive] = {}
        # Messages between two ranks match by order alone, so offers and wants need lanes of their own.
        self._offers = _member(comm.split(0))
        self._wants = _member(comm.split(0))

    @property
    def rank(self) -> int:
        """This worker's place in the group."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """How many workers the group has."""
        return self._comm.size

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group underneath; what goes through it directly is not checked."""
        return self._comm.group

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Check, then broadcast."""
        self._agree("broadcast", describe(tensor), root=root)
        return self._comm.broadcast(tensor, root)

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum", root: int = 0) -> Tensor | None:
        """Check, then reduce."""
        self._agree("reduce", describe(tensor), op=op, root=root)
        return self._comm.reduce(tensor, op, root)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Check, then reduce."""
        self._agree("all_reduce", describe(tensor), op=op)
        return self._comm.all_reduce(tensor, op)

    def all_reduce_async(self, tensor: Tensor, op: ReduceOp = "sum") -> PendingReduction:
        """Check, then start."""
        self._agree("all_reduce_async", describe(tensor), op=op)
        return self._comm.all_reduce_async(tensor, op)

    def all_reduce_(self, tensor: Tensor, op: ReduceOp = "sum") -> PendingReduction:
        """Check, then start."""
        self._agree("all_reduce_", describe(tensor), op=op)
        return self._comm.all_reduce_(tensor, op)

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        """Check, then gather."""
        self._agree("gather", describe(tensor), root=root)
        return self._comm.gather(tensor, root)

    def scatter(self, tensors: Sequence[Tensor] | None, *, like: Tensor, root: int = 0) -> Tensor:
        """Check, then scatter."""
        self._agree("scatter", describe(like), root=root)
        return self._comm.scatter(tensors, like=like, root=root)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Check, then gather."""
        self._agree("all_gather", describe(tensor))
        return self._comm.all_gather(tensor)

    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Tensor:
        """Check, then reduce."""
        self._agree("reduce_scatter", f"{len(tensors)} of {describe(*tensors[:1])}", op=op)
        return self._comm.reduce_scatter(tensors, op)

    def all_to_all(self, tensors: Sequence[Tensor], *, rows: Sequence[int] | None = None) -> list[Tensor]:
        """Check, then exchange; the first dimension is free, and whether `rows` is given must agree."""
        asks = "asking for rows" if rows is None else "rows given"
        self._agree("all_to_all", f"{len(tensors)} of {describe(*tensors[:1], free_rows=True)}, {asks}")
        return self._comm.all_to_all(tensors, rows=rows)

    def send(self, tensor: Tensor, to: int) -> None:
        """Check with the receiver, and send."""
        self.isend(tensor, to).wait()

    def recv(self, *, like: Tensor, source: int) -> Tensor:
        """Check with the sender, and receive."""
        return self.irecv(like=like, source=source).wait()

    def isend(self, tensor: Tensor, to: int) -> Pending[None]:
        """Start to send; `wait` raises when the receiver expects something else."""
        self._sent[to] += 1
        offer = CollectiveCall("send", self._sent[to], describe(tensor), fingerprint.call_site())
        offered = self._offers.isend(offer.encode(), to)
        wanted = self._wants.irecv(like=offer.encode(), source=to)

        def compare() -> None:
            offered.wait()
            fingerprint.compare_pair(self.rank, offer, to, CollectiveCall.decode(wanted.wait()))

        return _CheckedSend(compare, wanted, self._comm.isend(tensor, to))

    def irecv(self, *, like: Tensor, source: int) -> Pending[Tensor]:
        """Start to receive; `wait` raises when the sender sends something else."""
        self._received[source] += 1
        want = CollectiveCall("recv", self._received[source], describe(like), fingerprint.call_site())
        wanted = self._wants.isend(want.encode(), source)
        offered = self._offers.irecv(like=want.encode(), source=source)
        previous = self._last.get(source)

        def receive() -> Pending[Tensor]:
            if previous is not None:
                previous.accept()
            wanted.wait()
            fingerprint.compare_pair(source, CollectiveCall.decode(offered.wait()), self.rank, want)
            return self._comm.irecv(like=like, source=source)

        self._last[source] = _CheckedReceive(receive, offered)
        return self._last[source]

    def barrier(self) -> None:
        """Check; whoever has the answer knows that everybody came."""
        self._agree("barrier")

    def split(self, color: int | None, key: int | None = None) -> Comm | None:
        """Check, then split; the parts are checked too."""
        self._agree("split")
        part = self._comm.split(color, key)
        return None if part is None else CheckedComm(part)

    def close(self) -> None:
        """Leave the group and the lanes beside it."""
        for comm in (self._offers, self._wants, self._comm):
            comm.close()

    def _agree(self, operation: str, what: str = "", *, op: str = "", root: int | None = None) -> None:
        self._number += 1
        details = [what, op, "" if root is None else f"root {root}"]
        arguments = ", ".join(detail for detail in details if detail)
        mine = CollectiveCall(operation, self._number, arguments, fingerprint.call_site())
        calls = [CollectiveCall.decode(data) for data in self._comm.all_gather(mine.encode())]
        fingerprint.compare(dict(enumerate(calls)))


class _CheckedSend:
    """A message on its way out, and what the receiver says it wants."""

    def __init__(self, compare: Callable[[], None], wanted: Pending[Tensor], message: Pending[None]) -> None:
        self._compare, self._wanted, self._message = compare, wanted, message

    def wait(self) -> None:
        """Compare, then wait for the message."""
        self._compare()
        self._message.wait()

    def done(self) -> bool:
        """Return whether the comparison and the message are through."""
        return self._wanted.done() and self._message.done()


class _CheckedReceive:
    """A message on its way in; it is taken in only when the sender's offer fits."""

    def __init__(self, receive: Callable[[], Pending[Tensor]], offered: Pending[Tensor]) -> None:
        self._receive: Callable[[], Pending[Tensor]] | None = receive
        self._offered = offered
        self._message: Pending[Tensor] | None = None

    def wait(self) -> Tensor:
        """Compare the calls of both ends, then return the received tensor."""
        return self.accept().wait()

    def done(self) -> bool:
        """Return whether the message is here; raises when it is the wrong one."""
        return self._offered.done() and self.accept().done()

    def accept(self) -> Pending[Tensor]:
        """Compare and start to receive, once, and after every earlier message from the same rank."""
        if self._message is None and self._receive is not None:
            self._message = self._receive()
            # Releases the earlier messages, which would otherwise be kept as long as the group.
            self._receive = None
        if self._message is None:
            raise PacelineError(
                "a checked message was accepted twice at once. Wait for it from one thread only."
            )
        return self._message


def _member(comm: Comm | None) -> Comm:
    if comm is None:
        raise PacelineError(
            "a split with one colour left this rank out. The Comm it was made from is broken."
        )
    return comm

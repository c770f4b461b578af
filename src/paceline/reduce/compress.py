"""Gradients made smaller on their way between workers: `--compress bf16`, `fp16` or `powersgd:RANK`.

It goes over sockets, between all workers, also where they share a host: shared memory moves bytes faster than they can
be made fewer. The ledger (loss and weight) and auxiliary terms never shrink, so what a run reports is exact.

bf16 and fp16, level numeric: each worker rounds its own sum once, the sums are added in float32 (torch's hooks add in
the small type, and round at every addition), and the total is rounded once more. With u = 2^-8 (bf16) or 2^-11 (fp16)
a gradient is off by at most (2u + u^2) times the sum of its magnitudes on the workers. fp16 has too few exponents for
gradients, so each message carries a power of two that its numbers are divided by; what is 2^-28 of the largest
number of a message or less loses precision.

powersgd, level statistical: a matrix goes as two thin ones (Vogels et al., 2019); what they miss is added to the next
step's gradient. That remainder is this worker's own: it is not in checkpoints, and a new group begins without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.compat import process_groups
from paceline.reduce.exchange import Done, Exchange, program
from paceline.reduce.powersgd import LowRank, Matrix
from paceline.world import Comm

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Span(NamedTuple):
    """Where one parameter's gradient lies in a bucket."""

    start: int
    shape: torch.Size
    place: int
    """The parameter's number: the same every step, in whatever bucket it is."""
    exact: bool

    @property
    def stop(self) -> int:
        """Return where the next one begins."""
        return self.start + self.shape.numel()


class CompressedExchange(ABC):
    """What all ways have in common: which part of a bucket goes as it is, and the count of bytes."""

    def __init__(self, comm: Comm, exact: Exchange) -> None:
        self._comm, self._exact = comm, exact
        self._spans: dict[int, list[Span]] = {}
        self.sent = 0
        """Bytes of compressed messages that left this worker."""

    def lay_out(self, key: int, spans: list[Span]) -> None:
        """Announce what lies where in the bucket that is started next under `key`; others go as they are."""
        self._spans[key] = spans

    def start(self, key: int, parts: Sequence[Tensor], target: Tensor, done: Done) -> None:
        """Make a bucket small and send it on its way."""
        spans = self._spans.pop(key, None)
        if spans is None or target.dtype.itemsize < 4:
            self._exact.start(key, parts, target, done)
            return
        kept = [span for span in spans if self._goes_as_it_is(span)]
        if kept:
            self._send_exactly(key, parts, target, kept)
        for part in parts:
            if part is not target:
                target.add_(part)
        for span in kept:
            # A weight of many tokens beside small gradients would take all the room that fp16 has for exponents.
            target[span.start : span.stop] = 0.0
        self._send(target, [span for span in spans if span not in kept], done)

    def finish(self) -> None:
        """Complete everything started."""
        # Sums of what goes as it is are written over what compression made of it.
        self._receive()
        self._exact.finish()

    def _goes_as_it_is(self, span: Span) -> bool:
        return span.exact

    def _send_exactly(self, key: int, parts: Sequence[Tensor], target: Tensor, kept: list[Span]) -> None:
        pieces = [torch.cat([part[span.start : span.stop] for span in kept]) for part in parts]

        def put_back() -> None:
            lengths = [span.stop - span.start for span in kept]
            for span, piece in zip(kept, torch.split(pieces[0], lengths), strict=True):
                target[span.start : span.stop] = piece

        self._exact.start(key, pieces, pieces[0], put_back)

    @abstractmethod
    def _send(self, target: Tensor, spans: list[Span], done: Done) -> None:
        """Start the small message of one tensor; each kind of compression has its own."""

    @abstractmethod
    def _receive(self) -> None:
        """Complete every message started, in order."""


class CastExchange(CompressedExchange):
    """Rounded to a small type: one all-to-all of chunks, additions in float32 in tree order, one all-gather."""

    def __init__(self, comm: Comm, exact: Exchange, small: torch.dtype) -> None:
        super().__init__(comm, exact)
        self._small = small
        self._header = 1 if small is torch.float16 else 0
        self._program, _ = program([(rank, rank + 1) for rank in range(comm.size)], comm.size)
        self._pending: list[tuple[Tensor, Tensor, Tensor, dist.Work, Done]] = []

    def _send(self, target: Tensor, spans: list[Span], done: Done) -> None:  # noqa: ARG002
        size = self._comm.size
        chunk = -(-target.numel() // size)
        rows = target.new_zeros(size * chunk) if target.numel() % size else target
        if rows is not target:
            rows[: target.numel()] = target
        sent = self._rounded(rows.view(size, chunk))
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._comm.group, async_op=True)
        self._count(sent)
        self._pending.append((target, sent, received, work, done))

    def _receive(self) -> None:
        gathering = []
        for target, _, received, work, done in self._pending:
            work.wait()
            rows = self._widened(received, target.dtype)
            for into, source in self._program:
                rows[into] += rows[source]
            total = self._rounded(rows[:1])
            everything = torch.empty_like(received)
            gathered = process_groups.all_gather_single(
                everything, total, group=self._comm.group, async_op=True
            )
            self._count(everything)
            gathering.append((target, total, everything, gathered, done))
        self._pending = []
        for target, _, everything, gathered, done in gathering:
            gathered.wait()
            target.copy_(self._widened(everything, target.dtype).view(-1)[: target.numel()])
            done()

    def _count(self, rows: Tensor) -> None:
        """Count one row for each of the others."""
        self.sent += (self._comm.size - 1) * rows[0].numel() * rows.element_size()

    def _rounded(self, rows: Tensor) -> Tensor:
        """Return rows in the small type, each behind the power of two it was divided by where one is needed."""
        small = torch.empty(len(rows), self._header + rows.shape[1], dtype=self._small, device=rows.device)
        if not self._header:
            return small.copy_(rows)
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True)
        # Up to 2^15 of the 2^16 that there are. What is not finite stays so, for the loss scaler to find.
        power = torch.frexp(largest.nan_to_num(1.0, 1.0)).exponent.sub(15).clamp(-100, 100)
        small[:, :1] = power
        small[:, 1:] = torch.ldexp(rows, -power)
        return small

    def _widened(self, small: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what `_rounded` was given, rounded."""
        rows = small.to(dtype)
        return torch.ldexp(rows[:, 1:], rows[:, :1]) if self._header else rows


class PowerExchange(CompressedExchange):
    """Matrices as the product of two thin ones; vectors and small matrices as they are."""

    def __init__(self, comm: Comm, exact: Exchange, rank: int) -> None:
        super().__init__(comm, exact)
        self._low_rank = LowRank(comm, rank)
        self._pending: list[tuple[list[Matrix], Done]] = []

    def _goes_as_it_is(self, span: Span) -> bool:
        return span.exact or not self._low_rank.shrinks(span.shape)

    def _send(self, target: Tensor, spans: list[Span], done: Done) -> None:
        values = {span.place: target[span.start : span.stop].view(span.shape[0], -1) for span in spans}
        self._pending.append((self._low_rank.start(values), done))
        self.sent = self._low_rank.sent

    def _receive(self) -> None:
        pending, self._pending = self._pending, []
        running = [(self._low_rank.second(matrices), done) for matrices, done in pending]
        for matrices, done in running:
            self._low_rank.finish(matrices)
            done()
        self.sent = self._low_rank.sent

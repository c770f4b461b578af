"""The collectives and messages, each as the MPI requests that it starts and what is done when they have ended.

Each function is a generator: it yields requests and goes on when they are done. The first requests of an operation are started
on `comms.first` in the order of the calls; the later ones on `comms.later`, in the same order on all ranks (`progress.py`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import InputError
from paceline.world.mpi.buffers import Memory, joined, overlaps, raw, raw_parts, separated, size_of, typed
from paceline.world.mpi.progress import MpiError, Steps, kept_on_error
from paceline.world.mpi.reductions import MpiReduction


class Comms(NamedTuple):
    """The two communicators of a group."""

    mpi: Any
    first: Any
    later: Any
    rank: int
    size: int

    def free(self) -> None:
        """Free both communicators."""
        self.later.Free()
        self.first.Free()


def barrier(comms: Comms) -> Steps:
    """Wait for everybody."""
    yield [comms.first.Ibarrier()]


def broadcast(comms: Comms, tensor: Tensor, root: int) -> Steps:
    """Broadcast the root's tensor."""
    memory = Memory(tensor, read=comms.rank == root)
    yield [comms.first.Ibcast(raw(comms.mpi, memory.held), root)]
    if comms.rank != root:
        memory.bring_back()


def all_reduce(comms: Comms, tensor: Tensor, reduction: MpiReduction) -> Steps:
    """Combine everybody's tensor, for everybody."""
    memory = Memory(tensor)
    value = memory.held.view(-1)
    if reduction.factor is not None:
        value.copy_(reduction.before(value))
    if reduction.by_mpi:
        kind, operation = reduction.types(comms.mpi)
        yield [comms.first.Iallreduce(comms.mpi.IN_PLACE, typed(comms.mpi, value, kind), operation)]
    else:
        bounds = [place * value.numel() // comms.size for place in range(comms.size + 1)]
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        mine = lengths[comms.rank]
        parts = value.new_empty(comms.size * mine)
        width = value.element_size()
        sent = raw_parts(comms.mpi, value, [length * width for length in lengths])
        yield [comms.first.Ialltoallv(sent, raw_parts(comms.mpi, parts, [mine * width] * comms.size))]
        part = reduction.combine(parts.view(comms.size, mine).unbind(0)).contiguous()
        counts = [length * width for length in lengths]
        yield [comms.later.Iallgatherv(raw(comms.mpi, part), raw_parts(comms.mpi, value, counts))]
    reduction.after(value, comms.size)
    memory.bring_back()


def reduce(comms: Comms, tensor: Tensor, reduction: MpiReduction, root: int) -> Steps:
    """Combine everybody's tensor at the root."""
    memory = Memory(tensor)
    value = reduction.before(memory.held.view(-1))
    at_root = comms.rank == root
    if reduction.by_mpi:
        kind, operation = reduction.types(comms.mpi)
        result = torch.empty_like(value) if at_root else None
        received = None if result is None else typed(comms.mpi, result, kind)
        yield [comms.first.Ireduce(typed(comms.mpi, value, kind), received, operation, root)]
    else:
        parts = value.new_empty(comms.size * value.numel()) if at_root else None
        received = None if parts is None else raw(comms.mpi, parts)
        yield [comms.first.Igather(raw(comms.mpi, value), received, root)]
        result = None if parts is None else reduction.combine(parts.view(comms.size, -1).unbind(0))
    if result is not None:
        memory.held.view(-1).copy_(result)
        reduction.after(memory.held, comms.size)
        memory.bring_back()


def all_gather(comms: Comms, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
    """Gather all tensors on every rank; their sizes may differ."""
    _check_size("all_gather", outputs[comms.rank], tensor)
    memory = Memory(tensor)
    counts = [size_of(one) for one in outputs]
    flat = torch.empty(sum(counts), dtype=torch.uint8, device=memory.held.device)
    yield [comms.first.Iallgatherv(raw(comms.mpi, memory.held), raw_parts(comms.mpi, flat, counts))]
    separated(flat, outputs)


def all_gather_single(comms: Comms, output: Tensor, tensor: Tensor) -> Steps:
    """Gather all tensors on every rank, one after the other in one."""
    if output.numel() != comms.size * tensor.numel() or output.dtype is not tensor.dtype:
        raise InputError(
            f"all_gather of {tensor.numel()} values of {tensor.dtype} on {comms.size} ranks needs "
            f"{comms.size * tensor.numel()}, but the output has {output.numel()} of {output.dtype}."
        )
    source, memory = Memory(tensor), Memory(output, read=False)
    # The input may be a part of the output, which MPI forbids.
    sent = source.held.clone() if overlaps(source.held, memory.held) else source.held
    yield [comms.first.Iallgather(raw(comms.mpi, sent), raw(comms.mpi, memory.held))]
    memory.bring_back()


def gather(comms: Comms, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Steps:
    """Collect everybody's tensor at the root."""
    memory = Memory(tensor)
    if comms.rank != root:
        yield [comms.first.Igatherv(raw(comms.mpi, memory.held), None, root)]
        return
    counts = [size_of(one) for one in outputs]
    flat = torch.empty(sum(counts), dtype=torch.uint8, device=memory.held.device)
    yield [comms.first.Igatherv(raw(comms.mpi, memory.held), raw_parts(comms.mpi, flat, counts), root)]
    separated(flat, outputs)


def scatter(comms: Comms, output: Tensor, tensors: Sequence[Tensor], root: int) -> Steps:
    """Scatter to each rank one of the root's tensors."""
    memory = Memory(output, read=False)
    sent = None
    if comms.rank == root:
        flat = joined(tensors)
        sent = raw_parts(comms.mpi, flat, [size_of(one) for one in tensors])
    yield [comms.first.Iscatterv(sent, raw(comms.mpi, memory.held), root)]
    memory.bring_back()


def reduce_scatter(comms: Comms, output: Tensor, tensors: Sequence[Tensor], reduction: MpiReduction) -> Steps:
    """Combine the lists item by item and keep this rank's; items may differ in size."""
    _check_size("reduce_scatter", output, tensors[comms.rank])
    flat = joined(tensors).view(output.dtype)
    return _scatter_sum(comms, output, flat, [one.numel() for one in tensors], reduction)


def reduce_scatter_single(comms: Comms, output: Tensor, tensor: Tensor, reduction: MpiReduction) -> Steps:
    """Combine everybody's tensor and keep this rank's part."""
    if tensor.numel() != comms.size * output.numel() or tensor.dtype is not output.dtype:
        raise InputError(
            f"reduce_scatter into {output.numel()} values of {output.dtype} on {comms.size} ranks needs "
            f"{comms.size * output.numel()}, but the input has {tensor.numel()} of {tensor.dtype}."
        )
    source = Memory(tensor).held.view(-1)
    sent = source.clone() if overlaps(source, output) else source
    return _scatter_sum(comms, output, sent, [output.numel()] * comms.size, reduction)


def _scatter_sum(
    comms: Comms, output: Tensor, flat: Tensor, lengths: Sequence[int], reduction: MpiReduction
) -> Steps:
    memory = Memory(output, read=False)
    value = reduction.before(flat)
    result = memory.held.view(-1)
    if reduction.by_mpi:
        kind, operation = reduction.types(comms.mpi)
        received = typed(comms.mpi, result, kind)
        yield [comms.first.Ireduce_scatter(typed(comms.mpi, value, kind), received, list(lengths), operation)]
    else:
        mine, width = lengths[comms.rank], value.element_size()
        parts = value.new_empty(comms.size * mine)
        sent = raw_parts(comms.mpi, value, [length * width for length in lengths])
        yield [comms.first.Ialltoallv(sent, raw_parts(comms.mpi, parts, [mine * width] * comms.size))]
        result.copy_(reduction.combine(parts.view(comms.size, mine).unbind(0)))
    reduction.after(result, comms.size)
    memory.bring_back()


def all_to_all(comms: Comms, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Steps:
    """Send item i to rank i."""
    flat = joined(tensors)
    coming = [size_of(one) for one in outputs]
    received = torch.empty(sum(coming), dtype=torch.uint8, device=flat.device)
    sent = raw_parts(comms.mpi, flat, [size_of(one) for one in tensors])
    yield [comms.first.Ialltoallv(sent, raw_parts(comms.mpi, received, coming))]
    separated(received, outputs)


def all_to_all_single(
    comms: Comms, output: Tensor, tensor: Tensor, coming: Sequence[int], leaving: Sequence[int]
) -> Steps:
    """Send each rank its rows of one tensor."""
    memory, source = Memory(output, read=False), Memory(tensor)
    sent = source.held.clone() if overlaps(source.held, memory.held) else source.held
    yield [
        comms.first.Ialltoallv(
            raw_parts(comms.mpi, sent, _row_bytes(comms, tensor, leaving)),
            raw_parts(comms.mpi, memory.held, _row_bytes(comms, output, coming)),
        )
    ]
    memory.bring_back()


def send(comms: Comms, tensor: Tensor, to: int, tag: int) -> Steps:
    """Send to one rank."""
    memory = Memory(tensor)
    yield [comms.first.Isend(raw(comms.mpi, memory.held), to, tag)]


def receive(comms: Comms, tensor: Tensor, source: int | None, tag: int, came_from: list[int]) -> Steps:
    """Receive from one rank, or from any; `came_from` is told which."""
    memory = Memory(tensor, read=False)
    statuses = yield [
        comms.first.Irecv(
            raw(comms.mpi, memory.held), comms.mpi.ANY_SOURCE if source is None else source, tag
        )
    ]
    (status,) = statuses or [comms.mpi.Status()]
    came_from.append(status.Get_source())
    if (size := status.Get_count(comms.mpi.BYTE)) != size_of(tensor):
        raise MpiError(f"the message has {size} bytes, but the tensor has {size_of(tensor)}")
    memory.bring_back()


def together(several: Sequence[Steps]) -> Steps:
    """Take the steps of several operations side by side."""
    running = list(several)
    statuses: dict[int, list[Any] | None] = {}
    while running:
        started: list[tuple[Steps, list[Any]]] = []
        for steps in running:
            with contextlib.suppress(StopIteration), kept_on_error(several):
                started.append((steps, list(steps.send(statuses.get(id(steps))))))
        if not started:
            return
        done = (yield [request for _, requests in started for request in requests]) or []
        for steps, requests in started:
            statuses[id(steps)], done = done[: len(requests)], done[len(requests) :]
        running = [steps for steps, _ in started]


def _check_size(name: str, output: Tensor, tensor: Tensor) -> None:
    if size_of(output) != size_of(tensor):
        raise InputError(
            f"{name}: this rank's tensor has {size_of(tensor)} bytes, but its place in the list has {size_of(output)}."
        )


def _row_bytes(comms: Comms, tensor: Tensor, rows: Sequence[int]) -> list[int]:
    """Return how many bytes of a tensor go to, or come from, each rank; no rows mean equal parts."""
    length = tensor.shape[0] if tensor.dim() else 1
    if not rows:
        if length % comms.size:
            raise InputError(
                f"all_to_all of {length} rows on {comms.size} ranks: the parts are not equal. Give split sizes."
            )
        return [size_of(tensor) // comms.size] * comms.size
    if sum(rows) != length or len(rows) != comms.size:
        raise InputError(
            f"all_to_all: split sizes {list(rows)} do not add up to the {length} rows of the tensor, one per rank."
        )
    width = size_of(tensor) // length if length else 0
    return [count * width for count in rows]

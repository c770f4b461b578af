"""Messages between neighbouring stages: whatever passes from one to the other, with its true shape.

A message is a note on the host (what the tensors are, where the random streams stand) and then the tensors. The note comes
first, so shapes may differ from micro-batch to micro-batch, and nothing waits for a device to learn them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InputError
from paceline.world import Pending, World
from paceline.world.interruption import LOOK_S

NOTE = 13312
"""Bytes of a note: up to 10200 of them say where the random streams stand, 5056 for torch's own."""


@dataclass(frozen=True)
class _Form:
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    """The dimensions from the one that lies furthest apart in memory to the closest."""


@dataclass(frozen=True)
class StageMessage:
    """A message that has been announced; its tensors may still be on their way."""

    note: Any
    _pending: Sequence[tuple[_Form, Pending[Tensor]]]

    def tensors(self) -> list[Tensor]:
        """Return the tensors, laid out in memory as the sender had them."""
        return [_restored(pending.wait(), form) for form, pending in self._pending]


class Links:
    """One worker's messages to and from the others of its pipeline."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._leaving: list[Pending[None]] = []
        """Through gloo."""
        self._on_stream: list[Pending[None]] = []
        """Through NCCL, where a wait orders the stream of the thread that waits, so that this thread must be the one."""

    def send(self, to: int, note: Any, tensors: Sequence[Tensor]) -> None:
        """Start a message; it has left when `flush` returns, and until then nobody may write to the tensors: see `own`."""
        comm = self._world.comm
        forms = list(map(_form, tensors))
        packed = pickle.dumps((note, forms))
        if len(packed) > NOTE:
            raise InputError(
                f"{len(tensors)} tensors and {len(packed)} bytes of other values pass from one pipeline stage to the next, too "
                "many to announce. Cut the model elsewhere: name other modules in pipeline_stages()."
            )
        buffer = torch.zeros(NOTE, dtype=torch.uint8)
        buffer[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self._leaving.append(comm.isend(buffer, to))
        for one, form in zip(tensors, forms, strict=True):
            by_nccl = one.is_cuda and self._world.carrier == "nccl"
            leaving = self._on_stream if by_nccl else self._leaving
            leaving.append(comm.isend(one.detach().permute(form.order), to))

    def receive(self, source: int) -> StageMessage:
        """Wait for the note of the next message of a worker, and start to receive its tensors."""
        comm = self._world.comm
        buffer = comm.recv(like=torch.empty(NOTE, dtype=torch.uint8), source=source)
        # The bytes come from a worker of this very run, which runs the same code with the same rights.
        note, forms = pickle.loads(buffer.numpy().tobytes())  # noqa: S301
        pending = [(form, comm.irecv(like=_empty(form, self._world.device), source=source)) for form in forms]
        return StageMessage(note, pending)

    def flush(self) -> None:
        """Wait until everything that was sent has left, or the group is broken.

        For gloo in a thread: at times it never ends the wait for a message to a worker that has left the group.
        """
        on_stream, self._on_stream = self._on_stream, []
        for one in on_stream:
            one.wait()
        leaving, self._leaving = self._leaving, []
        failures: list[Exception] = []

        def wait() -> None:
            try:
                for one in leaving:
                    one.wait()
            except Exception as failure:  # noqa: BLE001  (raised again below)
                failures.append(failure)

        waiter = Thread(target=wait, name="paceline-leaving", daemon=True)
        waiter.start()
        while waiter.is_alive():
            broken = self._world.interruption.raised
            waiter.join(LOOK_S)
            if broken and waiter.is_alive():
                self._world.interruption.check()
        if failures:
            raise failures[0]


def own(tensor: Tensor) -> Tensor:
    """Return the values of a tensor in memory of their own, laid out as it has them.

    Whoever made it may write there again in the next pass, before a message of this one has left, and torch sees no harm in
    that: the graph needs no output of its last operation, and nothing at all of what takes no gradient.
    """
    form = _form(tensor)
    return _restored(tensor.detach().permute(form.order).clone(memory_format=torch.contiguous_format), form)


def _form(tensor: Tensor) -> _Form:
    return _Form(tuple(tensor.shape), tensor.dtype, _order(tensor))


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Return the order of dimensions in which a tensor lies in memory; kernels may choose their way by it."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda side: (-strides[side], side)))


def _empty(form: _Form, device: torch.device) -> Tensor:
    return torch.empty([form.shape[side] for side in form.order], dtype=form.dtype, device=device)


def _restored(values: Tensor, form: _Form) -> Tensor:
    back = sorted(range(len(form.order)), key=lambda side: form.order[side])
    return values.permute(back)

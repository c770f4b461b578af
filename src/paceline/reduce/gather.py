"""Gathers the weights of a parameter group: over the process group, or in memory that the workers of one host share.

In shared memory every worker lays its rows where the message is to be read from, so nothing travels: torch's own copies
into the message and out of it are the only ones. A few places for messages are used in turn. Before a worker writes into
one it knows that everybody has copied out what was there before, or set it aside.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.compat import process_groups
from paceline.errors import InputError
from paceline.world import World
from paceline.world.shared_memory import SharedMemoryChannel, open_channel
from paceline.world.world import SHARED_MEMORY

PLACES = 3
"""Messages that there is room for. torch has one in flight while it works with another."""
ARRIVED, COPIED, BEGUN, MET = range(4)
"""The flags: my rows are in the message; I have copied out all messages up to this one; what `begin` and `meets` count."""
_BITS = 20
Wait = Callable[..., bool]
"""What waits for a message, for a while at most where that is given."""


class Gather(Protocol):
    """How the rows of all workers come together."""

    def begin(self) -> None:
        """Know that this worker begins what all go through together: a step, an evaluation, a save."""

    def meets(self, what: int) -> bool:
        """Wait for all others at a gathering that only the loop's own code asks for; return whether they ask for it, too.

        False is certain: somebody has begun something else, or asks for something else than `what`.
        """

    def reserve(self, length: int) -> None:
        """Know how many bytes the largest message has, before there is any."""

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for one message."""

    def start(self, message: Tensor, rows: Tensor, group: dist.ProcessGroup, *, later: bool) -> Wait | None:
        """Fill a message that has this worker's rows at their place; return what waits until it is complete."""


class SocketGather:
    """Over the process group."""

    def __init__(self, place: World) -> None:
        self._comm, self._beginning = place.comm, torch.full((1,), -1, device=place.device)

    def begin(self) -> None:
        """Tell the others: no flag that they could look at is here. Nobody reads it in a step, so no GPU is waited for."""
        self._comm.all_gather(self._beginning)

    def meets(self, what: int) -> bool:
        """Return whether all others tell the same."""
        told = self._comm.all_gather(torch.full_like(self._beginning, what))
        return all(int(one) == what for one in told)

    def reserve(self, length: int) -> None:
        """Need nothing beforehand."""

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory from torch's own allocator."""
        return torch.empty(count, dtype=dtype, device=device)

    def start(self, message: Tensor, rows: Tensor, group: dist.ProcessGroup, *, later: bool) -> Wait | None:
        """Send the rows to everybody; on a CPU without keeping this process waiting, whatever torch asks for."""
        later = later or message.device.type == "cpu"
        work: dist.Work | None = process_groups.all_gather_single(message, rows, group=group, async_op=later)
        return None if work is None else work.wait


class SharedMemoryGather:
    """Through the memory of one host."""

    def __init__(self, channel: SharedMemoryChannel) -> None:
        self._channel = channel
        self._places: list[int] = []
        self._number = self._begun = self._met = 0
        self._open: dict[int, Tensor] = {}
        """Messages that were not waited for yet, the oldest first."""

    def begin(self) -> None:
        """Raise a flag, at which nobody waits."""
        self._begun += 1
        self._channel.post(BEGUN, self._begun)

    def meets(self, what: int) -> bool:
        """Wait for the flags of all others."""
        self._met += 1
        met = self._met << _BITS
        self._channel.post(MET, met | what)
        together = self._channel.meets(MET, met, BEGUN, self._begun)
        # Who is at the next one by now has compared this one.
        return together and all(
            one == met | what for one in self._channel.raised(MET) if one >> _BITS == self._met
        )

    def reserve(self, length: int) -> None:
        """Set memory aside."""
        self._places = [self._channel.reserve(length) for _ in range(PLACES)]

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: ARG002
        """Return the place of the next message, once everybody is done with the one before."""
        number = self._number + 1
        oldest = next(iter(self._open), number)
        if oldest <= number - PLACES:
            self._set_aside(oldest)
        # What was waited for is copied out by now: torch does that at once, and only then goes on. It is said before any
        # wait, since others may wait for it at the same place.
        self._channel.post(COPIED, next(iter(self._open), number) - 1)
        self._channel.wait(COPIED, max(number - PLACES, 0))
        return self._channel.tensor(self._places[number % PLACES], count, dtype)

    def start(
        self,
        message: Tensor,
        rows: Tensor,  # noqa: ARG002
        group: dist.ProcessGroup,  # noqa: ARG002
        *,
        later: bool,  # noqa: ARG002
    ) -> Wait | None:
        """Signal that this worker's rows are there."""
        self._number += 1
        self._open[self._number] = message
        self._channel.post(ARRIVED, self._number)
        return partial(self._complete, self._number)

    def _complete(self, number: int, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        """Wait for the rows of all others, before torch copies a message out."""
        if number in self._open:
            self._channel.wait(ARRIVED, number)
            del self._open[number]
        return True

    def _set_aside(self, number: int) -> None:
        """Allocate own memory for a message: torch may gather ahead what a backward pass never needs, a frozen block say."""
        message = self._open[number]
        self._complete(number)
        message.data = message.clone()


def open_gather(place: World, transport: str) -> Gather:
    """Choose how weights travel among those who share a model; all of them choose alike."""
    shared = reach_channel(place, transport)
    return SocketGather(place) if shared is None else SharedMemoryGather(shared)


def reach_channel(world: World, transport: str) -> SharedMemoryChannel | None:
    """Open a channel where there can be one and `transport` does not speak against it."""
    opened = open_channel(world) if transport != "gloo" else None
    world.note_transport(None if opened is None else SHARED_MEMORY)
    if opened is None and transport == "shm":
        raise InputError(
            "--transport shm needs CPU workers on one Linux host (x86-64 or aarch64) for fsdp. Use --transport gloo."
        )
    return opened

"""Snapshots of each worker's part of the state in a neighbour's memory, taken every few steps while training goes on.

Training waits only until its own part is copied aside; a thread then sends it to the next worker (on another machine,
where there are several) through a group of its own, and receives the part of the one before. The last two are
kept: one that all have, and one that may still be on its way when a worker is lost.
"""

from __future__ import annotations

import copy
import pickle
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.contents import own_slots, with_slots
from paceline.recovery.position import Position
from paceline.state.chunks import LocalState, TensorChunk
from paceline.world import Comm, World, all_gather_object
from paceline.world.interruption import Interruption

KEPT = 2
RELEASE_S = 1.0
"""How long an exchange may take to fail when its group has broken.

Gloo may forget a message that was in flight at that moment, and wait for it until its time-out: such a thread is left behind.
"""
_LOOK_S = 0.1


@dataclass
class Snapshot:
    """What this worker has copied of one moment of the run, and been sent by its neighbour."""

    position: Position
    shared: dict[str, Any]
    extra_state: dict[str, Any]
    own: dict[str, TensorChunk]
    answers_for: frozenset[str]
    """Whose slots are in its own part (`LocalState.answers_for`)."""
    received: dict[str, TensorChunk] = field(default_factory=dict)
    received_answers_for: frozenset[str] = frozenset()


class PeerSnapshots:
    """One worker's snapshots of itself and of its neighbour."""

    def __init__(self, every: int | None) -> None:
        """`every` is how many steps lie between two; None where none are taken."""
        self.every = every
        self.kept: dict[int, Snapshot] = {}
        """By the number of steps taken."""
        self._comm: Comm | None = None
        self._to = self._source = 0
        self._thread: threading.Thread | None = None
        self._last: Snapshot | None = None
        """The one that was taken last, which may be on its way."""
        self._interruption = Interruption()

    def attach(self, world: World) -> None:
        """Use a group that has just formed; everybody calls it. Alone there is nobody to keep anything."""
        self.detach()
        self._comm, self._interruption, self._last = None, world.interruption, None
        if world.size > 1:
            self._comm = world.comm.split(0)
            ring = _ring(world)
            here = ring.index(world.rank)
            self._to, self._source = ring[(here + 1) % world.size], ring[here - 1]

    def detach(self) -> None:
        """Release the group; it is broken, or about to be left."""
        self._end_exchange()

    def _end_exchange(self) -> bool:
        """Wait for the exchange in flight; return whether it has ended, and not been left behind in a broken group."""
        thread, until = self._thread, None
        while thread is not None and thread.is_alive():
            thread.join(_LOOK_S)
            if self._interruption.raised:
                until = until or time.monotonic() + RELEASE_S
                if time.monotonic() > until:
                    break
        self._thread = None
        return thread is None or not thread.is_alive()

    def take(self, position: Position, shared: dict[str, Any], held: LocalState, *, anew: bool) -> None:
        """Copy this worker's part aside and send it on its way; everybody does so at the same step.

        `anew` where the loop may have changed something since the last snapshot of this step: that one must not serve any more.
        """
        if self._comm is None:
            return
        ended = self._end_exchange()
        if anew:
            self.kept.pop(position.number, None)
        if not ended:
            # The group broke, and nobody would receive it. Whoever asks stands between two operations, where nothing
            # regroups: the next operation finds out, and the next group takes one at once.
            return
        # A schedule may go on in the very tensors that its state shows.
        extra_state = copy.deepcopy(held.extra_state)
        snapshot = Snapshot(position, shared, extra_state, to_host(held.chunks), held.answers_for)
        self._last = snapshot
        # One of the same step that another group took stays until this one is whole.
        self.kept.setdefault(position.number, snapshot)
        self._thread = threading.Thread(
            target=self._exchange, args=(self._comm, snapshot), name="paceline-snapshots", daemon=True
        )
        self._thread.start()

    def amend(self, position: Position, shared: dict[str, Any]) -> None:
        """Replace the shared values in the snapshot of a step by newer ones; nothing is sent for it."""
        for snapshot in (self._last, self.kept.get(position.number)):
            if snapshot is not None and snapshot.position.number == position.number:
                snapshot.shared = shared

    def forget_after(self, number: int) -> None:
        """Drop what was taken of steps that are taken anew."""
        self.kept = {key: one for key, one in self.kept.items() if key <= number}
        self._last = None

    def _exchange(self, comm: Comm, snapshot: Snapshot) -> None:
        try:
            number = snapshot.position.number
            rows = [(key, chunk.meta, chunk.bounds) for key, chunk in snapshot.own.items()]
            header = number, rows, own_slots(snapshot.extra_state), snapshot.answers_for
            told = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
            theirs, metas, slots, answers_for = pickle.loads(self._swap(comm, told).numpy().tobytes())  # noqa: S301  (a worker of this run)
            if theirs != number:
                raise RuntimeError(f"a copy of step {theirs} came for one of step {number}")
            sent = [chunk.values.reshape(-1).view(torch.uint8) for chunk in snapshot.own.values()]
            buffer = self._swap(comm, torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8))
        except RuntimeError:
            return  # the group broke; what is here already may serve
        if comm is not self._comm:
            return  # left behind by now
        received: dict[str, TensorChunk] = {}
        start = 0
        for key, meta, bounds in metas:
            size = bounds.numel * meta.dtype.itemsize
            values = buffer[start : start + size].clone().view(meta.dtype).view(bounds.shape)
            received[key] = TensorChunk(values, bounds, meta)
            start += size
        snapshot.received, snapshot.received_answers_for = received, answers_for
        snapshot.extra_state = with_slots(snapshot.extra_state, slots)
        self.kept[number] = snapshot
        for old in sorted(self.kept)[:-KEPT]:
            del self.kept[old]

    def _swap(self, comm: Comm, sent: Tensor) -> Tensor:
        """Send bytes to the next worker and return those of the one before."""
        length = comm.isend(torch.tensor(sent.numel()), self._to)
        size = int(comm.recv(like=torch.tensor(0), source=self._source))
        length.wait()
        sending = comm.isend(sent, self._to) if sent.numel() else None
        got = torch.empty(size, dtype=torch.uint8)
        if size:
            got = comm.recv(like=got, source=self._source)
        if sending is not None:
            sending.wait()
        return got


def _ring(world: World) -> list[int]:
    """Return the ranks in an order in which, where there are several machines, the next one is on another: one may be lost."""
    if world.nodes == 1:
        return list(range(world.size))
    nodes = all_gather_object(world.comm, world.node_rank)
    left = {node: [rank for rank in range(world.size) if nodes[rank] == node] for node in set(nodes)}
    ring: list[int] = []
    while len(ring) < world.size:
        last = nodes[ring[-1]] if ring else None
        # Whoever has most left comes next, so that none is left with only its own.
        node = max(left, key=lambda one: (bool(left[one]) and one != last, len(left[one]), -one))
        ring.append(left[node].pop(0))
    return ring


def to_host(chunks: dict[str, TensorChunk]) -> dict[str, TensorChunk]:
    """Copy chunks into host memory of their own."""
    return {
        key: TensorChunk(one.values.detach().to("cpu", copy=True).contiguous(), one.bounds, one.meta)
        for key, one in chunks.items()
    }

"""Several hosts: shared memory inside each, sockets between them, the same tree.

Each worker adds its chunk of what its own host's workers bring, as far up the tree as one host reaches; then the
workers of the same place on all hosts exchange those sums over sockets; then each host's workers collect the chunks.
A byte crosses the network once for each host, not once for each worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.data import owned_shards
from paceline.reduce.exchange import Done, Exchange, Layout, over_sockets
from paceline.reduce.shared_memory import ARRIVED, SUMMED, SharedMemoryExchange
from paceline.world import World, all_gather_object
from paceline.world.shared_memory import SharedMemoryChannel, machine, open_channel
from paceline.world.world import SHARED_MEMORY


@dataclass(frozen=True)
class _Running:
    number: int
    rows: list[Tensor]
    slots: list[Tensor]
    target: Tensor
    done: Done


class HostsExchange:
    """Sums among the workers of several hosts, as many on each."""

    def __init__(self, channel: SharedMemoryChannel, inside: Layout, across: Exchange) -> None:
        self._channel, self._inside, self._across = channel, inside, across
        self._memory = SharedMemoryExchange(channel, inside)
        self._number = 0
        self._running: list[_Running] = []

    def start(self, key: int, parts: Sequence[Tensor], target: Tensor, done: Done) -> None:
        """Copy in the chunks that others of this host will add."""
        inside = self._inside
        slots = self._memory.room(key, target)
        rows = list(slots)
        first = inside.first[inside.rank]
        rows[first : first + len(parts)] = parts
        low, high = inside.bounds(target.numel())[inside.rank]
        for slot, part in zip(slots[first:], parts, strict=False):
            slot[:low].copy_(part[:low])
            slot[high:].copy_(part[high:])
        self._number += 1
        self._channel.post(ARRIVED, self._number)
        self._running.append(_Running(self._number, rows, slots, target, done))

    def finish(self) -> None:
        """Add inside the host, exchange between hosts, collect inside the host."""
        running, self._running = self._running, []
        inside = self._inside
        chunks = []
        for key, one in enumerate(running):
            self._channel.wait(ARRIVED, one.number)
            low, high = inside.bounds(one.target.numel())[inside.rank]
            for into, source in inside.program:
                one.rows[into][low:high].add_(one.rows[source][low:high])
            sums = [one.rows[place][low:high] for place in inside.left]
            chunks.append(sums[-1])
            if low < high:
                # What the exchange between hosts has to say is said when the hosts have collected it.
                self._across.start(key, sums, sums[-1], lambda: None)
        self._across.finish()
        for one, total in zip(running, chunks, strict=True):
            low, high = inside.bounds(one.target.numel())[inside.rank]
            published = one.slots[inside.first[inside.rank]][low:high]
            published.copy_(total)
            one.target[low:high].copy_(published)
            self._channel.post(SUMMED, one.number)
        for one in running:
            self._channel.wait(SUMMED, one.number)
            for rank, (low, high) in enumerate(inside.bounds(one.target.numel())):
                if rank != inside.rank:
                    one.target[low:high].copy_(one.slots[inside.first[rank]][low:high])
            one.done()


def open_shared_memory(world: World, shards: int, hosts: Sequence[object] | None = None) -> Exchange | None:
    """Open a channel on every host and sockets between them; None where that is not possible, for all workers alike.

    `hosts` says for each rank which host it is on; by default the machines are asked.
    """
    hosts = all_gather_object(world.comm, machine()) if hosts is None else hosts
    order = list(dict.fromkeys(hosts))
    members = [[rank for rank, host in enumerate(hosts) if host == which] for which in order]
    contiguous = [rank for ranks in members for rank in ranks] == list(range(world.size))
    if not contiguous or len({len(ranks) for ranks in members}) != 1 or len(members) == world.size:
        return None
    if len(members) == 1:
        channel = open_channel(world)
        if channel is None:
            return None
        world.note_transport(SHARED_MEMORY)
        return SharedMemoryExchange(channel, Layout.of_workers(world, shards))
    return _open_hosts(world, shards, members, order.index(hosts[world.rank]))


def _open_hosts(world: World, shards: int, members: list[list[int]], host: int) -> Exchange | None:
    place = members[host].index(world.rank)
    local, across = world.comm.split(host), world.comm.split(place)
    if local is None or across is None:
        raise RuntimeError("a group without its own member")
    channel = open_channel(replace(world, rank=place, size=len(members[host]), comm=local))
    if not all(all_gather_object(world.comm, channel is not None)) or channel is None:
        return None
    carried = [[owned_shards(rank, world.size, shards, world.shares) for rank in ranks] for ranks in members]
    whole = [range(owned[0].start, owned[-1].stop) for owned in carried]
    world.note_transport(SHARED_MEMORY)
    world.note_transport()
    between = over_sockets(across, Layout(host, whole, shards))
    return HostsExchange(channel, Layout(place, carried[host], shards), between)

"""`World`: who this worker is, where it computes, and whom it can talk to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.distributed_c10d import Store

from paceline.world.base import Comm
from paceline.world.interruption import Interruption
from paceline.world.local import LocalComm
from paceline.world.mesh import DATA, SAME_SAMPLES, Mesh
from paceline.world.status_page import NoStatusPage

SHARED_MEMORY, CALLS, THREADS, NO_TRANSPORT = "shared memory", "calls", "threads", "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One worker's view of all the workers of one generation."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int
    device: torch.device
    backend: str
    """What carries the tensors: "gloo", "cpu:gloo,cuda:nccl", "mpi", or "local" in a world of one."""
    generation: int
    """Counts up each time the workers regroup after one died, left or joined."""
    host: str
    comm: Comm
    shares: tuple[int, ...] | None = None
    """How many shards each rank carries (of those data is dealt to), where they are not dealt out evenly."""
    mesh: Mesh = field(default_factory=lambda: Mesh(()))
    """How the workers are laid out; flat where nobody said otherwise."""
    interruption: Interruption = field(default_factory=Interruption)
    """What ends every wait for the others, when one of them is gone."""
    status_page: NoStatusPage = field(default_factory=NoStatusPage)
    """Where this worker shows its launcher what it is at."""
    apart: int = 0
    """How many steps one worker may be ahead of another: with a staleness, those that are slow are waited for longer."""
    store: Store | None = None
    """Where the workers of this generation met: its own, so what is written there is never read by another group."""
    closing: list[Callable[[], None]] = field(default_factory=list)
    """What is done when this worker leaves the world, before its connections go."""

    transports: set[str] = field(default_factory=set)
    """What has been opened for gradients, weights and activations to travel by; the worlds along a side add to the same set."""
    counts_samples: bool = field(init=False)
    """Whether this worker answers for its samples: those beside it along SAME_SAMPLES see the same ones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts_samples", self.mesh.leads(self.rank, *SAME_SAMPLES))

    @property
    def is_first(self) -> bool:
        """Whether this worker speaks for all: rank 0."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """This worker's place among those that data is dealt out to."""
        return self.mesh.index(self.rank, *DATA) if self.mesh.sizes else self.rank

    @property
    def dp_size(self) -> int:
        """How many there are that data is dealt out to."""
        return self.mesh.size(*DATA) if self.mesh.sizes else self.size

    @property
    def serves(self) -> bool:
        """Whether this worker holds parameters for the others and is dealt no data."""
        return self.mesh.serves(self.rank)

    def note_transport(self, name: str | None = None) -> None:
        """Record what tensors really travel by; without a name, the backend of the process group."""
        if self.size > 1:
            self.transports.add(self.carrier if name is None else name)

    @property
    def transport(self) -> str:
        """What tensors really travel by; nothing in a world of one."""
        if self.size == 1:
            return NO_TRANSPORT
        return " + ".join(sorted(self.transports, reverse=True)) or self.carrier

    @property
    def carrier(self) -> str:
        """What the process group moves tensors of this worker's device with: gloo, nccl or mpi."""
        kinds = dict(part.split(":") for part in self.backend.split(",")) if ":" in self.backend else {}
        return kinds.get(self.device.type, self.backend)

    def submesh(self, *sides: str) -> World:
        """Return the world of those who differ from this worker along these sides of the mesh only.

        Everybody must call it with the same sides; data is dealt out flat in it. Servers come to the world of all servers.
        """
        mesh = self.mesh if self.mesh.sizes else Mesh.flat(self.size)
        members = mesh.members(self.rank, *sides)
        if len(members) == self.size:
            return replace(self, mesh=Mesh(()))
        # Where there are servers everybody splits, because the groups have not all one size.
        splits = mesh.servers or len(members) > 1
        made = self.comm.split(mesh.group(self.rank, *sides)) if splits else None
        if splits and made is None:
            raise RuntimeError("a group without its own member")
        comm = LocalComm() if made is None or len(members) == 1 else made
        return replace(self, rank=members.index(self.rank), size=len(members), comm=comm, mesh=Mesh(()))

    def describe(self) -> str:
        """Return it in one line."""
        return (
            f"rank {self.rank} of {self.size} on {self.host} "
            f"(local rank {self.local_rank} of {self.local_size}, node {self.node_rank} of {self.nodes}), "
            f"{self.device}, {self.backend}, generation {self.generation}"
        )

    def close(self) -> None:
        """Leave the world; a second call does nothing."""
        while self.closing:
            self.closing.pop()()
        self.comm.close()

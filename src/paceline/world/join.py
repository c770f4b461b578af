"""How a worker enters a world: alone, or connected to the others through a store."""

from __future__ import annotations

import functools
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from paceline.compat import process_groups
from paceline.errors import InputError
from paceline.transport.addresses import at
from paceline.transport.store import RunStore
from paceline.world import env
from paceline.world.backends import choose_backend, choose_device
from paceline.world.base import Comm
from paceline.world.checked import CheckedComm
from paceline.world.env import Identity
from paceline.world.interfaces import is_loopback, reaching
from paceline.world.interruption import InterruptedWaitError, Interruption, broken
from paceline.world.local import LocalComm
from paceline.world.process_group import Patience, ProcessGroupComm, reading_together
from paceline.world.run_secret import run_secret
from paceline.world.sockets import Sockets
from paceline.world.status_page import NoStatusPage
from paceline.world.world import World

SILENT_S = 20.0
"""How long workers wait for each other before they say so."""


def alone(device: str = "cpu") -> World:
    """Make the world of one worker; it needs no process group."""
    return connect(Identity(rank=0, size=1, local_rank=0, local_size=1), device=device)


def connect(
    identity: Identity,
    *,
    store: Store | None = None,
    backend: str = "auto",
    device: str = "auto",
    timeout_s: float = 300.0,
    meeting_s: float | None = None,
    checked: bool = False,
    generation: int = 0,
    shares: tuple[int, ...] | None = None,
    interruption: Interruption | None = None,
    on: torch.device | None = None,
    status_page: NoStatusPage | None = None,
    presence: Presence | None = None,
) -> World:
    """Enter the world as `identity`, and return when everybody has.

    The workers meet at `store`, or, without one, at the identity's master address and port (torchrun's way).
    Each launch and each generation has its own prefix there, so what a dead group left behind is never read. `on` is the
    device of a worker that has one already, from the group before. `meeting_s` is how long the others may take to connect;
    gloo waits up to five times that for one that is killed in the very moment, and nothing can interrupt it. `presence` knows
    of the others where they may be at another call.
    """
    place = choose_device(device, identity.local_rank) if on is None else on
    carrier = choose_backend(backend, place, identity.local_size)
    if place.type == "cuda":
        # Makes CUDA ready here and now, so that later seeding reaches its generators.
        torch.cuda.set_device(place)
        torch.cuda.init()  # type: ignore[no-untyped-call]
    comm: Comm
    met: Store | None = None
    place_in_store = f"{of_launch(identity)}/generation-{generation}"
    interruption = interruption or Interruption()
    if identity.size == 1:
        comm, carrier = LocalComm(), "local"
    else:
        comm, met = _met_others(
            identity,
            store,
            carrier,
            Patience(timedelta(seconds=timeout_s), timedelta(seconds=meeting_s or timeout_s)),
            place_in_store,
            interruption,
            presence,
        )
    return World(
        rank=identity.rank,
        size=identity.size,
        local_rank=identity.local_rank,
        local_size=identity.local_size,
        node_rank=identity.node_rank,
        nodes=identity.nodes,
        device=place,
        backend=carrier,
        generation=generation,
        host=env.host(),
        comm=CheckedComm(comm) if checked else comm,
        shares=shares,
        interruption=interruption,
        status_page=status_page or NoStatusPage(),
        store=None if met is None else PrefixStore(f"{place_in_store}/beside", met),
    )


class Presence(Protocol):
    """Knows of the other ranks where their processes live on after a call."""

    def arrive(self, store: Store, timeout_s: float) -> None:
        """Wait until all ranks have come; raise where one will not."""

    def others(self) -> str:
        """Return where the others are; empty where nothing is known of it."""


def _met_others(
    identity: Identity,
    store: Store | None,
    carrier: str,
    patience: Patience,
    place_in_store: str,
    interruption: Interruption,
    presence: Presence | None,
) -> tuple[Comm, Store]:
    """Meet all others at the store, and form a group with them."""
    if dist.is_initialized():
        raise InputError(
            "this process is already in a process group. Close that world before connecting again."
        )
    _choose_interface(identity)
    with telling_of_a_wait(identity, patience.timeout.total_seconds(), presence):
        met = store or meet(identity, patience.timeout)
        if isinstance(met, RunStore):
            interruption.on_raise(functools.partial(met.interrupt, broken))
        if presence is not None:
            presence.arrive(met, patience.timeout.total_seconds())
        return _join_group(identity, met, carrier, patience, place_in_store, interruption), met


@contextmanager
def telling_of_a_wait(
    identity: Identity, timeout_s: float, presence: Presence | None = None
) -> Iterator[None]:
    """Print a line where the others do not come for long; two ranks do, for one of them may be who is missing."""

    def tell() -> None:
        waited = f"rank {identity.rank} has waited {SILENT_S:.0f} s for all {identity.size} ranks to meet"
        known = "" if presence is None else presence.others()
        why = known or "some have not been started, or cannot reach this machine"
        print(f"{waited}, and waits on, {timeout_s:.0f} s in all: {why}", file=sys.stderr)  # noqa: T201

    timer = threading.Timer(SILENT_S, tell)
    timer.daemon = True
    if identity.rank < 2:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _join_group(
    identity: Identity,
    meeting: Store,
    backend: str,
    patience: Patience,
    place_in_store: str,
    interruption: Interruption,
) -> ProcessGroupComm:
    sockets = Sockets()
    process_groups.count_groups_anew()
    try:
        # Only gloo's ranks all write an address, which each of them reads.
        together = reading_together(meeting if backend == "gloo" else None, identity.size)
        with together, sockets.opened_here():
            dist.init_process_group(
                _name_in_torch(backend),
                store=PrefixStore(place_in_store, meeting),
                rank=identity.rank,
                world_size=identity.size,
                timeout=patience.meeting,
            )
        interruption.on_raise(sockets.shut)
        group = dist.group.WORLD
        if group is None:
            raise InputError(
                "torch made no process group. Check that this build of torch has distributed support."
            )
        comm = ProcessGroupComm(group, patience=patience, interruption=interruption, store=meeting)
        # A connection made may be one that its other end still makes: who leaves now would break the group for the others.
        comm.barrier()
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    return comm


def _name_in_torch(backend: str) -> str:
    """Return torch's name of a backend; ours on MPI is loaded and made known here."""
    if backend != "mpi":
        return backend
    from paceline.world.mpi import process_group

    return process_group.register()


def meet(identity: Identity, timeout: timedelta) -> Store:
    """Reach the store of the run, or the one at the master's address: torch's rendezvous knows when torchrun's agent keeps it."""
    if identity.store:
        return run_store(identity.store).for_group(
            timeout_s=timeout.total_seconds(), timed_out=InterruptedWaitError
        )
    if identity.master_port == 0:
        raise InputError(
            "MASTER_PORT is not set, so the workers cannot meet. Launch with torchrun or paceline, or set it."
        )
    url = f"tcp://{at(identity.master_address, identity.master_port)}"
    store = _at_master(url, identity.rank, identity.size, timeout)
    store.set_timeout(timeout)
    return store


class _Met(NamedTuple):
    where: tuple[str, int, int]
    store: Store


_met: _Met | None = None
"""The store that this process met the others at, where no launcher serves one. Rank 0 may keep it: were it made anew for the
next launch, another rank could still reach the old one, and lose it in the middle."""


def _at_master(url: str, rank: int, size: int, timeout: timedelta) -> Store:
    global _met  # noqa: PLW0603  (a process has one master)
    if _met is None or _met.where != (url, rank, size):
        _met = None  # closes it before the next one is made
        store: Store
        store, _, _ = next(rendezvous(url, rank, size, timeout=timeout))
        _met = _Met((url, rank, size), store)
    return _met.store


def of_launch(identity: Identity) -> str:
    """Return what the keys of this launch begin with, in a store that the next launch of the same processes meets at, too."""
    return f"launch-{identity.launch}"


@functools.lru_cache(maxsize=1)
def run_store(address: str) -> RunStore:
    """Return this process's connection to the store of the run."""
    return RunStore(address, secret=run_secret() if address.startswith("tcp:") else None)


_INTERFACE = "GLOO_SOCKET_IFNAME"


def interface_preserved() -> AbstractContextManager[None]:
    """Put back afterwards which interface gloo is told to use."""
    return env.preserved(_INTERFACE)


@contextmanager
def device_preserved() -> Iterator[None]:
    """Put back afterwards which CUDA device is chosen; before CUDA is in use it is the first."""
    before = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if torch.cuda.is_initialized() and torch.cuda.current_device() != before:  # type: ignore[no-untyped-call]
            torch.cuda.set_device(before)


def _choose_interface(identity: Identity) -> None:
    """Bind gloo to the loopback interface when the workers meet there; on several machines, to the one that reaches the master.

    Gloo itself goes by the host's name, which many machines know as a loopback address. What somebody has set stays.
    """
    if env.read(_INTERFACE) is not None:
        return
    chosen: str | None = None
    if is_loopback(identity.master_address):
        there = {name for _, name in socket.if_nameindex()}
        chosen = next((name for name in ("lo", "lo0") if name in there), None)
    elif identity.nodes > 1:
        chosen = reaching(identity.master_address).interface
    if chosen is not None:
        env.export({_INTERFACE: chosen})

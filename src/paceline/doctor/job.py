"""The checks inside a job that somebody else has started: machines compared, ports tried, one all-reduce over all workers."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from paceline.doctor import exchange
from paceline.doctor.card import Card, compare
from paceline.doctor.devices import ReadTorch
from paceline.doctor.finding import Finding, fail, ok, warn
from paceline.doctor.live import measure
from paceline.errors import InputError
from paceline.launch.nodes.reachability import ConnectionAttempts, ReachablePort, Target
from paceline.observe.formats import plural
from paceline.world import env, interfaces
from paceline.world.env import Identity
from paceline.world.join import connect, meet
from paceline.world.objects import all_gather_object
from paceline.world.world import World

COME_S = 60.0
"""How long the workers of a job may take to start."""
MEETING_S = 5.0
"""How long they may take to connect then; gloo waits up to five times that for one that nobody reaches."""


def examine(
    identity: Identity, local: Sequence[Finding], backend: str | None
) -> tuple[list[Finding], bool, dict[str, Any]]:
    """Return what is found on all machines of the job, whether that is the same on every rank, and what torch sees here.

    `local` is what was found on this machine; it is all there is where the workers do not come together.
    """
    seen = ReadTorch()(None)
    try:
        world = _connect(identity, backend or "auto")
    except (RuntimeError, InputError) as error:
        where = f"the {plural(identity.size, 'worker')} of this job do not come together at {identity.master_address}"
        what = f"{where}, seen from rank {identity.rank}: {' '.join(str(error).split())}"
        remedy = "Look at what is said of the network on each machine; `paceline doctor --hosts` tries single connections."
        return [*local, fail(exchange.CHECK, what[:600], remedy)], False, seen
    with contextlib.closing(world):
        return _in_world(world, identity, local), True, seen


def _connect(identity: Identity, backend: str) -> World:
    """Wait for all workers at their store, and then form the group, which takes a moment or never happens."""
    store = meet(identity, timedelta(seconds=COME_S))
    store.set(f"doctor/{identity.rank}", "here")
    store.wait([f"doctor/{rank}" for rank in range(identity.size)], timedelta(seconds=COME_S))
    return connect(identity, store=store, backend=backend, timeout_s=COME_S, meeting_s=MEETING_S)


def _in_world(world: World, identity: Identity, local: Sequence[Finding]) -> list[Finding]:
    speaks = identity.local_rank == 0
    told = all_gather_object(world.comm, list(local) if speaks else [])
    cards: list[Card] = all_gather_object(world.comm, Card.mine(f"rank {world.rank}"))
    firsts = [rank for rank, first in enumerate(all_gather_object(world.comm, speaks)) if first]
    found = [
        replace(one, machine=cards[rank].name) if len(firsts) > 1 else one
        for rank in firsts
        for one in told[rank]
    ]
    for rank in firsts[1:]:
        # Taken at one moment, as far as a collective is one.
        found += compare(cards[firsts[0]], cards[rank], cards[rank].name, cards[rank].clock - cards[0].clock)
    if len(firsts) > 1:
        found += _between_machines(world, identity, cards, speaks=speaks)
    where = f"{plural(world.size, 'worker')} of this job on {plural(len(firsts), 'machine')}"
    try:
        timings = measure(world)
    except RuntimeError as error:
        remedy = "Look at what is said of the network on each machine."
        return [*found, fail(exchange.CHECK, f"{world.carrier}: {where}: {error}", remedy)]
    return [*found, exchange.measured(world.carrier, where, timings)]


def _between_machines(
    world: World, identity: Identity, cards: Sequence[Card], *, speaks: bool
) -> list[Finding]:
    """Try a free port of each machine from every other, and the names of the others."""
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        target = None
        if speaks:
            own = interfaces.reaching(identity.master_address).address
            port = stack.enter_context(contextlib.closing(ReachablePort(own, selector)))
            target = Target(env.host(), port.address, port.port)
        targets = [one for one in all_gather_object(world.comm, target) if one is not None]
        failed = _reached([one for one in targets if one != target], selector) if speaks else {}
        unknown = [card.name for card in cards if not interfaces.resolve(card.name)] if speaks else []
        results = all_gather_object(world.comm, (dict(failed), sorted(set(unknown))))
    found = []
    for card, (missed, names) in zip(cards, results, strict=True):
        for other, why in missed.items():
            what = f"{card.name} does not reach a free port of {other}: {why}"
            remedy = "Workers talk over free ports: let the firewall pass TCP between the machines."
            found.append(fail("hosts", what, remedy, host=other))
        if names:
            what = f"{card.name} does not know the {plural(len(names), 'name')} {', '.join(names)}"
            found.append(warn("hosts", what, "Add them to DNS or /etc/hosts, where something goes by names."))
    machines = ", ".join(f"{one.name} ({one.address})" for one in targets)
    return found or [ok("hosts", f"the machines reach each other: {machines}")]


def _reached(targets: Sequence[Target], selector: selectors.BaseSelector) -> dict[str, str]:
    attempt = ConnectionAttempts(targets, selector)
    try:
        while (failed := attempt.failed(time.monotonic())) is None:
            for key, _ in selector.select(0.1):
                if selector.get_map().get(key.fd) is key:
                    key.data()
        return dict(failed)
    finally:
        attempt.close()

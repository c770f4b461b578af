"""Whether machines find and reach each other: the same command on each, which meet at a port. Imports no torch.

Each listens on the port of the rendezvous and on a free one, as a run would, and calls all the others. What is told there
(versions, clock, name) is told to whoever asks while the command runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.doctor.card import Card, compare
from paceline.doctor.finding import Finding, fail, ok, warn
from paceline.errors import InputError
from paceline.observe.formats import duration
from paceline.transport.addresses import at
from paceline.world import interfaces

CHECK = "hosts"
AGAIN_S = 0.25
ATTEMPT_S = 3.0
LINE = 4096
"""Most bytes that are read from anybody."""


@dataclass
class Peer:
    """Another machine, and what has come of calling it."""

    host: str
    address: str
    why: str = "it was not called"
    refused: bool = False
    """Whether it answered that nothing listens there: it is reached, and no firewall drops what is sent."""
    card: Card | None = None
    ahead_s: float = 0.0
    closed: str | None = None
    """Why its free port is not reached, where its known one is."""


@dataclass
class Meeting:
    """Calls the others, answers their calls, and ends when everybody has reached everybody, or at a deadline."""

    peers: Sequence[Peer]
    port: int
    wait_s: float
    identifier: str = field(default_factory=lambda: secrets.token_hex(8))
    free_port: int = 0
    callers: set[str] = field(default_factory=set)
    """Who has called the free port, which is the last that a machine does with another."""

    async def hold(self, bind: str) -> str | None:
        """Meet; return why this machine could not listen on the port, or None."""
        refusal = None
        async with contextlib.AsyncExitStack() as stack:
            free = await asyncio.start_server(self._answer_last_call, bind, 0, limit=LINE)
            await stack.enter_async_context(free)
            self.free_port = free.sockets[0].getsockname()[1]
            try:
                known = await asyncio.start_server(self._answer_call, bind, self.port, limit=LINE)
                await stack.enter_async_context(known)
            except OSError as error:
                refusal = error.strerror or str(error)
            deadline = time.monotonic() + self.wait_s
            await asyncio.gather(*(self._call(peer, deadline) for peer in self.peers))
            while time.monotonic() < deadline and not self._heard_of_all():
                await asyncio.sleep(AGAIN_S / 5)
        return refusal

    def _heard_of_all(self) -> bool:
        return all(peer.card is None or peer.card.identifier in self.callers for peer in self.peers)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        """Answer a card with ours; return whose it was."""
        theirs = None
        with contextlib.suppress(OSError, ValueError):
            theirs = Card.read(await asyncio.wait_for(reader.readline(), ATTEMPT_S))
            if theirs is not None:
                writer.write(Card.mine(self.identifier, self.free_port).packed())
                await writer.drain()
        writer.close()
        return None if theirs is None else theirs.identifier

    async def _answer_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._answer(reader, writer)

    async def _answer_last_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = await self._answer(reader, writer)
        if caller is not None:
            self.callers.add(caller)

    async def _call(self, peer: Peer, deadline: float) -> None:
        """Call a machine until it answers; it may be started a little later."""
        while True:
            sent = time.time()
            try:
                line = await asyncio.wait_for(self._ask(peer.address, self.port), ATTEMPT_S)
                peer.refused = False
            except OSError as error:  # a timeout is one
                peer.refused = isinstance(error, ConnectionRefusedError)
                peer.why = _reason(error)
            else:
                peer.card = Card.read(line)
                peer.why = "something else than this command answers there"
            if peer.card is not None:
                peer.ahead_s = peer.card.clock - (sent + time.time()) / 2
                await self._try_free_port(peer, peer.card.port)
                return
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(AGAIN_S)

    async def _try_free_port(self, peer: Peer, port: int) -> None:
        try:
            await asyncio.wait_for(self._ask(peer.address, port), ATTEMPT_S)
        except OSError as error:
            peer.closed = _reason(error)

    async def _ask(self, address: str, port: int) -> bytes:
        """Send our card to a port and return the line that answers it, or what there is of one."""
        reader, writer = await asyncio.open_connection(address, port, limit=LINE)
        try:
            writer.write(Card.mine(self.identifier, self.free_port).packed())
            return await reader.readline()
        except ValueError:  # a line longer than the limit
            return b""
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {ATTEMPT_S:g} s"
    return error.strerror or str(error) or type(error).__name__


def hosts(names: Sequence[str], port: int, wait_s: float) -> list[Finding]:
    """Look at the names of machines, meet those that run this command too, and compare them with this one."""
    found: list[Finding] = []
    peers: list[Peer] = []
    here: list[str] = []
    for name in names:
        told, peer = _look_up(name)
        found += told
        if interfaces.is_here(name):
            here.append(name)
        elif peer is not None:
            peers.append(peer)
    if not here:
        found.append(
            warn(
                CHECK,
                f"none of {', '.join(names)} is this machine: the others do not call it back",
                "Name all machines of the run in --hosts, this one too.",
            )
        )
    if not peers:
        return found
    try:
        bind = interfaces.address_to_bind(here[0]) if here else interfaces.reaching(peers[0].address).address
        meeting = Meeting(peers, port, wait_s)
        refusal = asyncio.run(meeting.hold(bind))
    except (OSError, InputError) as error:
        return [*found, fail(CHECK, f"this machine cannot listen for the others: {error}", "Check --hosts.")]
    if refusal is not None:
        what = f"port {port} of this machine cannot be listened on: {refusal}"
        found.append(
            warn(CHECK, what, "A run of yours may hold it. Give another one with --port, on all machines.")
        )
    mine = Card.mine(meeting.identifier)
    return found + [one for peer in peers for one in _judge(peer, mine, port, wait_s)]


def _look_up(name: str) -> tuple[list[Finding], Peer | None]:
    """Resolve a host and look for a route to it."""
    known = interfaces.resolve(name)
    if not known:
        remedy = "Correct the name, add it to DNS or /etc/hosts, or give an address."
        return [fail(CHECK, f"{name} is no host that this machine knows", remedy, host=name)], None
    if all(interfaces.is_loopback(one) for one in known) and not interfaces.is_loopback(name):
        what = f"{name} leads this machine to {known[0]}, where no other machine reaches it"
        remedy = (
            "Correct /etc/hosts: the name must lead to an address that the others see. Or give addresses."
        )
        return [warn(CHECK, what, remedy, host=name)], None
    try:
        end = interfaces.reaching(name)
    except InputError:
        remedy = "Connect both to one network, or add a route: ip route add NETWORK via ROUTER."
        return [fail(CHECK, f"there is no route to {name} ({', '.join(known)})", remedy, host=name)], None
    address = next(
        (one for one in known if interfaces.family(one) == interfaces.family(end.address)), known[0]
    )
    return [], Peer(name, address)


def _judge(peer: Peer, mine: Card, port: int, wait_s: float) -> list[Finding]:
    where = f"{peer.host} ({at(peer.address, port)})"
    facts = {"host": peer.host, "address": peer.address, "port": port}
    if peer.card is None and peer.refused:
        what = f"{where} is reached, but nothing listened there for {duration(wait_s)}"
        remedy = "Run the same command there at the same time (--wait gives you longer)."
        return [warn(CHECK, what, remedy, **facts)]
    if peer.card is None:
        what = f"{where} is not reached: {peer.why}"
        remedy = (
            f"If it is up, a firewall is in the way: let TCP port {port} and the free ports ({_free_ports()}) pass between "
            "the machines. If the route is missing, add one."
        )
        return [fail(CHECK, what, remedy, **facts)]
    found = compare(mine, peer.card, peer.host, peer.ahead_s)
    if peer.closed is not None:
        what = f"{where} is reached, but not its port {peer.card.port}: {peer.closed}"
        remedy = f"Workers talk over free ports: let TCP {_free_ports()} pass between the machines too."
        return [*found, fail(CHECK, what, remedy, **facts)]
    return [*found, ok(CHECK, f"{where} is reached, and a free port of it", **facts)]


def _free_ports() -> str:
    """Return the range that this machine takes free ports from."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:  # noqa: PTH123
            return "-".join(file.read().split())
    except OSError:
        return "32768-60999"


def parsed(text: str) -> list[str]:
    """Read --hosts: names or addresses with commas between."""
    names = [one.strip() for one in text.split(",")]
    for name in names:
        if not name or any(mark in name for mark in " /@") or len(name) > 255:
            raise InputError(
                f"--hosts {text!r} is no list of machines. Give names or addresses: a,b,10.0.0.3."
            )
    return list(dict.fromkeys(names))

"""What a machine says when it comes to the one that leads, and what it is told where it came for another run. No torch."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.launch.nodes import travel
from paceline.launch.nodes.reachability import Target
from paceline.launch.nodes.rendezvous import Machine, Rendezvous
from paceline.version import __version__

_LONGEST_NAME = 253
_MOST_OPTIONS = 1000


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Who comes, how it is reached, and for which run."""

    host: str
    address: str
    dialed: str
    """The address of the leader that it called."""
    workers_address: str
    """Where the others reach its workers, and, on this port, try whether they do."""
    port: int
    spec: dict[str, str]
    """What must be the same on every machine, by the names that the user knows."""

    @property
    def machine(self) -> Machine:
        """Name it in sentences."""
        return Machine(host=self.host, address=self.address)

    @property
    def target(self) -> Target:
        """Where the others try to reach it."""
        return Target(str(self.machine), self.workers_address, self.port)

    def pack(self) -> dict[str, Any]:
        """Return it as a message."""
        return {"hello": asdict(self)}

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Hello:
        """Read it from a message; MalformedError where it is none."""
        fields = message.get("hello")
        hello = travel.made(cls, fields)
        try:
            for address in (hello.address, hello.dialed, hello.workers_address):
                ipaddress.ip_address(address)
        except ValueError as error:
            raise travel.MalformedError(str(error)) from None
        plain = all(isinstance(one, str) for pair in hello.spec.items() for one in pair)
        named = hello.host.isprintable() and 0 < len(hello.host) <= _LONGEST_NAME
        if not (plain and named and 1 <= hello.port <= 65535 and len(hello.spec) <= _MOST_OPTIONS):
            raise travel.MalformedError("a machine presents itself with names or numbers that cannot be")
        return hello


def spec_of(agreed: Mapping[str, str], rendezvous: Rendezvous) -> dict[str, str]:
    """Return all that is compared: what was agreed on, and what goes for every run."""
    return {"paceline": __version__, **agreed, "nodes": rendezvous.nodes}


def differences(leading: Mapping[str, str], other: Mapping[str, str], where: str) -> str:
    """Return what differs, by name: `lr is 0.2 here and 0.1 at the leader`."""
    names = sorted(name for name in {*leading, *other} if leading.get(name) != other.get(name))
    return ", ".join(
        f"{name} is {other.get(name, 'not set')} {where} and {leading.get(name, 'not set')} at the leader"
        for name in names
    )

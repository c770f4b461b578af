"""Where machines meet, how many of them, and how patient they are. Imports no torch.

The machine whose address is the rendezvous leads: its launcher listens there, and those of the others call it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from paceline.errors import InputError
from paceline.transport.addresses import at
from paceline.world import interfaces

DEFAULT_PORT = 29400


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where machines meet, how many of them, and how patient they are."""

    host: str
    port: int = DEFAULT_PORT
    min_nodes: int
    max_nodes: int
    join_s: float = 600.0
    """How long the first meeting may take."""
    last_call_s: float = 5.0
    """How long a meeting of enough machines waits for more; short, for late ones get in all the same."""
    silence_s: float = 15.0
    """How long nothing may be heard of a machine before it is given up."""
    leads: bool | None = None
    """Whether this machine was told to lead; None where its addresses say so."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise InputError(
                f"--nodes {self.nodes} is no number of machines. Give one, like 2, or a range, like 1:4."
            )
        if self.silence_s < 4:
            raise InputError(
                f"a machine that is silent for {self.silence_s:g} s may well be alive. Allow it 4 s or more."
            )
        if self.join_s <= 0:
            raise InputError(f"--join-timeout is {self.join_s:g}, but must be above 0 seconds.")
        if not 1 <= self.port <= 65535:
            raise InputError(f"--rendezvous names port {self.port}, which is none. Give one from 1 to 65535.")

    @classmethod
    def parse(cls, endpoint: str, nodes: str, **patience: Any) -> Rendezvous:
        """Read `host:port` (`[address]:port` for IPv6) and `2` or `1:4` from the command line."""
        parts = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::([0-9]{1,5}))?", endpoint.strip())
        if parts is None:
            raise InputError(
                f"--rendezvous {endpoint!r} is no meeting point. Give host:port, or [address]:port for IPv6."
            )
        numbers = re.fullmatch(r"([0-9]{1,4})(?::([0-9]{1,4}))?", nodes.strip())
        if numbers is None:
            raise InputError(
                f"--nodes {nodes!r} is no number of machines. Give one, like 2, or a range, like 1:4."
            )
        return cls(
            host=parts[1] or parts[2],
            port=int(parts[3] or DEFAULT_PORT),
            min_nodes=int(numbers[1]),
            max_nodes=int(numbers[2] or numbers[1]),
            **patience,
        )

    @property
    def nodes(self) -> str:
        """Write the number of machines as it was asked for."""
        return (
            f"{self.min_nodes}" if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"
        )

    @property
    def bound(self) -> str:
        """The address of this machine, which holds it, that everything else of the run listens on too."""
        if self.leads and not interfaces.is_here(self.host):
            return interfaces.reaching(self.host).address  # the rendezvous is a service's, which leads here
        return interfaces.address_to_bind(self.host)

    @property
    def endpoint(self) -> str:
        """Write the meeting point as it was asked for."""
        return at(self.host, self.port)

    def is_here(self) -> bool:
        """Return whether this machine is the one that holds it, and so leads."""
        return interfaces.is_here(self.host) if self.leads is None else self.leads


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine that came."""

    host: str
    address: str

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"

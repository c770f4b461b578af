"""How machines find each other, as a launcher sees it: where they meet, what is agreed there, who came. No torch.

Torch's dynamic rendezvous does the finding, in a process of its own (`rendezvous_agent.py`) that stays for the whole run, so that
a machine that comes late, or comes back, is let in while the workers train on. The machine whose address is
the rendezvous holds it, and leads: the others learn from it where to report and with which secret. That secret
keeps strangers out of the links; whoever can reach the rendezvous itself can read it, as with torchrun.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import InputError
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
    keep_alive_s: int = 5
    keep_alive_attempts: int = 3
    """A machine that missed so many signs of life has left, and another may take its place.

    Torch judges by the machines' wall clocks: they must agree to within that time.
    """
    poll_s: float = 1.0
    """How often to look for machines that wait to be let in."""
    answer_s: float = 60.0
    """How long the machine that holds the rendezvous may take to answer before it counts as gone."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise InputError(
                f"--nodes {self.nodes} is no number of machines. Give one, like 2, or a range, like 1:4."
            )
        # Torch looks at the others' signs of life once a second: at 2 s, machines that lived were taken for dead.
        if (patience := self.keep_alive_s * self.keep_alive_attempts) < 4:
            raise InputError(
                f"a machine that is silent for {patience} s may well be alive. Allow it 4 s or more."
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
    def silence_s(self) -> float:
        """How long nothing may be heard of a machine before it is given up."""
        return float(self.keep_alive_s * self.keep_alive_attempts)

    @property
    def bound(self) -> str:
        """The address of this machine, which holds it, that everything else of the run listens on too."""
        return interfaces.address_to_bind(self.host)

    @property
    def endpoint(self) -> str:
        """Write the meeting point as it was asked for."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_here(self) -> bool:
        """Return whether this machine is the one that holds it, and so leads."""
        return interfaces.is_here(self.host)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What the leader tells the others: where its launcher and the workers' store listen, and the run's secret."""

    control_port: int
    store_port: int
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine that came."""

    host: str
    address: str

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


@dataclass(frozen=True, kw_only=True)
class Met:
    """A round of the rendezvous is complete; the leader is in it."""

    round: int
    rank: int
    nodes: int
    machines: tuple[Machine, ...]
    """By rank, which says nothing about their ranks in other rounds."""
    leader: Machine
    """With the address that reaches it from here."""
    local: Machine
    """This machine, with the address that the leader sees."""
    offer: Offer


@dataclass(frozen=True)
class Waiting:
    """Nothing has happened yet, for this reason."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """Said to the leader: another machine came with another command, and was sent away."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """The rendezvous is over for this machine."""

    reason: str
    is_input: bool = False
    """The user's input is at fault: exit status 2."""


Report = Met | Waiting | Refused | Failed


def write_report(report: Report) -> bytes:
    """Return a report as a line."""
    return json.dumps({"kind": type(report).__name__, **dataclasses.asdict(report)}).encode() + b"\n"


def read_report(line: bytes) -> Report:
    """Read a report from its line."""
    fields = json.loads(line)
    kind = fields.pop("kind")
    if kind == "Failed":
        return Failed(**fields)
    if kind != "Met":
        return Waiting(**fields) if kind == "Waiting" else Refused(**fields)
    for name in ("leader", "local"):
        fields[name] = Machine(**fields[name])
    fields["machines"] = tuple(Machine(**machine) for machine in fields["machines"])
    fields["offer"] = Offer(**fields["offer"])
    return Met(**fields)

"""The table of strategies that must pass the contract. A new one joins by one line."""

from __future__ import annotations

from dataclasses import dataclass

SHARDS = 4
"""Every case trains with as many logical shards, whatever its workers, and so must every other strategy."""


@dataclass(frozen=True)
class Case:
    """One strategy at one number of workers."""

    strategy: str
    workers: int
    bitwise: bool

    @property
    def level(self) -> str:
        """Give the exactness that a run must declare."""
        return "bitwise" if self.bitwise else "numeric"

    def __str__(self) -> str:
        return f"{self.strategy}-{self.workers}"


CASES = [
    Case("dp", workers=2, bitwise=True),
    Case("dp", workers=3, bitwise=True),
    Case("ddp", workers=2, bitwise=False),
    Case("ddp", workers=3, bitwise=False),
    Case("ddp", workers=4, bitwise=False),
]

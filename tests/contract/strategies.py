"""The table of strategies that must pass the contract. A new one joins by one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SHARDS = 4
"""Every case trains with as many logical shards, whatever its workers, and so must every other strategy."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One strategy at one number of workers."""

    strategy: str
    workers: int
    bitwise: bool
    options: dict[str, Any] = field(default_factory=dict)
    """Of `RunOptions`, where a strategy has more than one way."""

    @property
    def level(self) -> str:
        """Give the exactness that a run must declare."""
        return "bitwise" if self.bitwise else "numeric"

    def __str__(self) -> str:
        return "-".join(map(str, (self.strategy, self.workers, *self.options.values())))


CASES = [
    Case(strategy="dp", workers=2, bitwise=True),
    Case(strategy="ddp", workers=3, bitwise=True),
    Case(strategy="ddp", workers=3, bitwise=True, options={"transport": "gloo"}),
    Case(strategy="ddp", workers=3, bitwise=False, options={"exact": "numeric"}),
    Case(strategy="ddp", workers=3, bitwise=True, options={"tuning": {"shard_optimizer": True}}),
    Case(strategy="fsdp", workers=3, bitwise=True),
    Case(strategy="ddp=2,fsdp=2", workers=4, bitwise=True),
    Case(strategy="tp", workers=2, bitwise=False),
    Case(strategy="pp", workers=2, bitwise=True),
    Case(strategy="ddp=2,pp=2", workers=4, bitwise=True, options={"tuning": {"schedule": "gpipe"}}),
    Case(strategy="ps", workers=3, bitwise=True, options={"servers": 2}),
]

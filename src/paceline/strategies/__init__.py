"""How one step is computed and combined. The table of strategies loads none of them, nor torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import UnknownNameError

if TYPE_CHECKING:
    from paceline.strategies.base import Strategy


@dataclass(frozen=True)
class Entry:
    """Where a strategy is, and what a launcher must know before any worker has loaded it."""

    reference: str
    description: str
    threaded: bool = False
    """Whether --workers counts threads of one process."""
    processes: int | None = None
    """How many processes it runs in, where that is not for --workers to say."""


STRATEGIES = {
    "single": Entry(
        "paceline.strategies.single:Single", "one process, one device: the reference", processes=1
    ),
    "dp": Entry(
        "paceline.strategies.dp:DataParallel",
        "one process, a thread a replica, a master that gathers",
        threaded=True,
        processes=1,
    ),
    "ddp": Entry(
        "paceline.strategies.ddp:Ddp",
        "one process a device, gradients summed in buckets during the backward pass",
    ),
}


def entry(name: str) -> Entry:
    """Give what is known of a strategy by name."""
    if name not in STRATEGIES:
        raise UnknownNameError("strategy", name, STRATEGIES)
    return STRATEGIES[name]


def load(name: str) -> Strategy:
    """Give the strategy itself."""
    module, _, attribute = entry(name).reference.partition(":")
    strategy: Strategy = getattr(importlib.import_module(module), attribute)()
    return strategy

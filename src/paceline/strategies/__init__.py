"""How one step is computed and combined."""

from paceline.strategies.catalogue import (
    PARTS,
    SHARDED_OPTIMIZER,
    STRATEGIES,
    Choice,
    StrategyEntry,
    choice,
    entry,
    is_sharded,
    load,
    several,
)

__all__ = [
    "PARTS",
    "SHARDED_OPTIMIZER",
    "STRATEGIES",
    "Choice",
    "StrategyEntry",
    "choice",
    "entry",
    "is_sharded",
    "load",
    "several",
]

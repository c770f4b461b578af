"""What is asked of a training: how many episodes, how many observers, one call a step or batches. Imports no torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from paceline.errors import InputError
from paceline.option_fields import Options, ranged
from paceline.ranges import COUNT, SEED, WORKERS

GOAL = 195.0
"""The mean return at which CartPole counts as solved."""
WINDOW = 100
"""Over so many episodes in a row."""


@dataclass(frozen=True, kw_only=True)
class RolloutRequest(Options):
    """A training of the agent; it ends when the task is solved, or after `episodes`."""

    episodes: int = ranged(1500, COUNT)
    observers: int = ranged(2, WORKERS)
    batched: bool = True
    """Whether the agent answers questions that wait together at once, or each by itself."""
    seed: int = ranged(0, SEED)


def check_installed() -> None:
    """Refuse to begin without the package that has the environment."""
    if importlib.util.find_spec("gymnasium") is None:
        raise InputError(
            'cartpole needs gymnasium, which is not installed. Install it with: pip install "paceline[rl]"'
        )

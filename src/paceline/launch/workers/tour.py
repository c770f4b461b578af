"""The tour of the collectives as a worker runs it."""

from __future__ import annotations

from typing import Any

from paceline.training.run import Run
from paceline.world.tour import tour


def main(run: Run, only: list[str] | None) -> dict[str, Any]:
    """Go through the operations on this run's world."""
    return tour(run.world, only)

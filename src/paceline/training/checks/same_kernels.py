"""Whether the workers of a run's first group compute with the same kernels; who comes later is asked where it joins."""

from __future__ import annotations

from contextlib import suppress

from torch.distributed import DistError

from paceline.strategies.base import Exactness
from paceline.world import World
from paceline.world.kernels import check_same_kind, kind_of
from paceline.world.words import leave_first


def kernels(world: World, exactness: Exactness, *, compiled: bool) -> str:
    """Return what must be alike on all workers where bits are promised; nothing where they are not."""
    return kind_of(world.device, compiled=compiled) if exactness is Exactness.BITWISE else ""


def check_same_kernels(world: World, mine: str) -> None:
    """Refuse to promise bits where a worker's device is of another kind than that of the first that has come here."""
    if not mine:
        return
    word = f"{world.rank} {mine}"
    first = word
    with suppress(DistError):  # the group breaks, which is noticed where its workers train together
        first = leave_first(world, "same/kernels", word)
    rank, there = first.split(" ", 1)
    check_same_kind(world.rank, mine, int(rank), there)

"""What torch, and its compiler, choose kernels by: machines of two kinds compute other bits.

The workers of a run's first group are compared as they come; who comes later is asked where it joins.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch.distributed import DistError

from paceline.errors import InputError
from paceline.world.words import leave_first

if TYPE_CHECKING:
    from paceline.world.world import World


def kind_of(device: torch.device, *, compiled: bool, exact: bool) -> str:
    """Return what kernels are chosen by: a GPU's size and capability (the compiler reads more), a CPU's instructions.

    Nothing where bits are not promised: all may differ there.
    """
    if not exact:
        return ""
    if device.type != "cuda":
        return f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    found = torch.cuda.get_device_properties(device)
    size = f"{found.multi_processor_count} multiprocessors of capability {found.major}.{found.minor}"
    return f"{found.name}, {size}" if compiled else size


def check_same_kernels(world: World, mine: str) -> None:
    """Refuse to promise bits where a worker's device is of another kind than that of the first that has come here."""
    if not mine:
        return
    word = first = f"{world.rank} {mine}"
    with suppress(DistError):  # the group breaks, which is noticed where its workers train together
        first = leave_first(world, "same/kernels", word)
    rank, there = first.split(" ", 1)
    check_same_kind(world.rank, mine, int(rank), there)


def check_same_kind(rank: int, here: str, other: int, there: str) -> None:
    """Refuse that a worker computes on another kind of device than one that was there before."""
    if here != there:
        raise InputError(
            f"rank {rank} computes on {here}, and rank {other} on {there}: torch chooses other kernels there, so the bits "
            "would depend on who computes what. Use machines of one kind, or --exact numeric."
        )

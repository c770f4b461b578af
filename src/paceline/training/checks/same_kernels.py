"""Whether all workers compute with the same kernels: torch, and its compiler, choose them by what a machine can do."""

from __future__ import annotations

import platform
from contextlib import suppress

import torch
from torch.distributed import DistError

from paceline.errors import InputError
from paceline.strategies.base import Exactness
from paceline.world import World
from paceline.world.words import leave_first


def check_same_kernels(world: World, exactness: Exactness, *, compiled: bool) -> None:
    """Refuse to promise bits where a worker's device is of another kind than that of the first that has come here."""
    if exactness is not Exactness.BITWISE:
        return
    mine = f"{world.rank} {kind_of(world.device, compiled=compiled)}"
    first = mine
    with suppress(DistError):  # the group breaks, which is noticed where its workers train together
        first = leave_first(world, f"same/kernels/{compiled}", mine)
    (_, here), (rank, there) = (one.split(" ", 1) for one in (mine, first))
    if here != there:
        raise InputError(
            f"rank {world.rank} computes on {here}, and rank {rank} on {there}: torch chooses other kernels there, so the bits "
            f"would depend on who computes what. Use {_same(world.device)} of one kind, or --exact numeric."
        )


def kind_of(device: torch.device, *, compiled: bool) -> str:
    """Return what kernels are chosen by: a GPU's size and capability (the compiler reads more), a CPU's instructions."""
    if device.type != "cuda":
        return f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    found = torch.cuda.get_device_properties(device)
    size = f"{found.multi_processor_count} multiprocessors of capability {found.major}.{found.minor}"
    return f"{found.name}, {size}" if compiled else size


def _same(device: torch.device) -> str:
    return "GPUs" if device.type == "cuda" else "CPUs"

"""What torch, and its compiler, choose kernels by: machines of two kinds compute other bits."""

from __future__ import annotations

import platform

import torch

from paceline.errors import InputError


def kind_of(device: torch.device, *, compiled: bool) -> str:
    """Return what kernels are chosen by: a GPU's size and capability (the compiler reads more), a CPU's instructions."""
    if device.type != "cuda":
        return f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    found = torch.cuda.get_device_properties(device)
    size = f"{found.multi_processor_count} multiprocessors of capability {found.major}.{found.minor}"
    return f"{found.name}, {size}" if compiled else size


def check_same_kind(rank: int, here: str, other: int, there: str) -> None:
    """Refuse that a worker computes on another kind of device than one that was there before."""
    if here != there:
        raise InputError(
            f"rank {rank} computes on {here}, and rank {other} on {there}: torch chooses other kernels there, so the bits "
            "would depend on who computes what. Use machines of one kind, or --exact numeric."
        )

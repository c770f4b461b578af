"""A real all-reduce of a few sizes, timed and checked: what every worker of the trial runs."""

from __future__ import annotations

import time
from typing import Any

import torch

from paceline.training.run import Run
from paceline.world.base import Comm
from paceline.world.world import World

SIZES = {1 << 10: 30, 1 << 20: 10, 16 << 20: 3}
"""Bytes of a tensor, and how often it is reduced: a quarter of a second in all over gloo on two cores."""


def main(run: Run) -> list[dict[str, Any]]:
    """Run the trial as a worker."""
    return measure(run.world)


def measure(world: World) -> list[dict[str, Any]]:
    """Time an all-reduce of each size; raise RuntimeError where a sum is wrong."""
    return [_timed(world.comm, world.device, size, times) for size, times in SIZES.items()]


def _timed(comm: Comm, device: torch.device, size: int, times: int) -> dict[str, Any]:
    mine = torch.full((size // 4,), float(comm.rank + 1), device=device)
    total = comm.all_reduce(mine, "sum")
    right = comm.size * (comm.size + 1) / 2
    if not bool((total == right).all()):
        raise RuntimeError(f"an all-reduce of {size} bytes over {comm.size} workers gave a wrong sum")
    comm.barrier()
    began = time.perf_counter()
    for _ in range(times):
        comm.all_reduce(mine, "sum")
    _synchronize(device)
    seconds = (time.perf_counter() - began) / times
    moved = 2 * (comm.size - 1) / comm.size * size
    return {"bytes": size, "seconds": seconds, "bus_bytes_per_s": moved / seconds}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

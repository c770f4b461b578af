"""What `paceline collectives` runs: each operation on small numbers, and what every rank held before and after it.

Every rank runs `tour` and gets the same observations back: plain lists and strings, ready for JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InputError, UnknownNameError
from paceline.training.run import Run
from paceline.world.base import Comm
from paceline.world.objects import all_gather_object
from paceline.world.world import World

Held = list[Any] | str | None
"""What a rank holds: numbers, a few words, or nothing."""


@dataclass(frozen=True, slots=True)
class Stop:
    """One operation of the tour."""

    sentence: str
    training: str
    show: Callable[[Comm, torch.device], tuple[Held, Held]]


def main(run: Run, only: list[str] | None) -> dict[str, Any]:
    """Run the tour as a worker."""
    return tour(run.world, only)


def tour(world: World, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the operations (all, or those named in `only`) and give what was seen on every rank."""
    for name in only or ():
        if name not in STOPS:
            raise UnknownNameError("operation", name, STOPS)
    if world.size < 2:
        raise InputError(
            "the tour shows what passes between workers, so one is too few. Use --workers 2 or more."
        )
    operations = []
    for name in [stop for stop in STOPS if not only or stop in only]:
        stop = STOPS[name]
        seen = all_gather_object(world.comm, stop.show(world.comm, world.device))
        operations.append(
            {
                "name": name,
                "sentence": stop.sentence,
                "training": stop.training,
                "before": [before for before, _ in seen],
                "after": [after for _, after in seen],
            }
        )
    return {
        "workers": world.size,
        "device": world.device.type,
        "backend": world.backend,
        "operations": operations,
    }


def _numbers(comm: Comm, device: torch.device) -> Tensor:
    """Two numbers that tell which rank they come from: 10 11 on rank 1."""
    return torch.tensor([10 * comm.rank, 10 * comm.rank + 1], device=device)


def _row(comm: Comm, device: torch.device) -> list[Tensor]:
    """One number for each rank: 10 11 12 13 on rank 1 of 4."""
    return [torch.tensor([10 * comm.rank + place], device=device) for place in range(comm.size)]


def _flat(tensors: Sequence[Tensor]) -> list[Any]:
    return [number for tensor in tensors for number in tensor.tolist()]


def _broadcast(comm: Comm, device: torch.device) -> tuple[Held, Held]:
    mine = _numbers(comm, device)
    return mine.tolist(), comm.broadcast(mine, root=0).tolist()


def _scatter(comm: Comm, device: torch.device) -> tuple[Held, Held]:
    parts = _row(comm, device) if comm.rank == 0 else None
    received = comm.scatter(parts, like=torch.tensor([0], device=device), root=0)
    return None if parts is None else _flat(parts), received.tolist()


def _gather(comm: Comm, device: torch.device) -> tuple[Held, Held]:
    mine = _numbers(comm, device)
    collected = comm.gather(mine, root=0)
    return mine.tolist(), None if collected is None else _flat(collected)


def _reduce(comm: Comm, device: torch.device) -> tuple[Held, Held]:
    mine = _numbers(comm, device)
    total = comm.reduce(mine, "sum", root=0)
    return mine.tolist(), None if total is None else total.tolist()


def _all_reduce(comm: Comm, device: torch.device) -> tuple[Held, Held]:
    mine = _numbers(comm, device)
    return mine.tolist(), comm.all_reduce(mine, "sum").tolist()


def _all_gather(comm: Comm, device: torch.device) -> tuple[Held, Held]:
    mine = _numbers(comm, device)
    return mine.tolist(), _flat(comm.all_gather(mine))


def _reduce_scatter(comm: Comm, device: torch.device) -> tuple[Held, Held]:
    parts = _row(comm, device)
    return _flat(parts), comm.reduce_scatter(parts, "sum").tolist()


def _all_to_all(comm: Comm, device: torch.device) -> tuple[Held, Held]:
    parts = _row(comm, device)
    return _flat(parts), _flat(comm.all_to_all(parts))


def _send_recv(comm: Comm, device: torch.device) -> tuple[Held, Held]:
    mine = _numbers(comm, device)
    sending = comm.isend(mine, (comm.rank + 1) % comm.size)
    received = comm.recv(like=mine, source=(comm.rank - 1) % comm.size)
    sending.wait()
    return mine.tolist(), received.tolist()


def _barrier(comm: Comm, device: torch.device) -> tuple[Held, Held]:
    del device
    comm.barrier()
    late_ms = 20 * comm.rank
    time.sleep(late_ms / 1000)
    arrived = time.monotonic()
    comm.barrier()
    return f"comes {late_ms} ms late", f"waited {1000 * (time.monotonic() - arrived):.0f} ms"


def _split(comm: Comm, device: torch.device) -> tuple[Held, Held]:
    mine = _numbers(comm, device)
    part = comm.split(comm.rank % 2)
    if part is None:
        raise InputError("a split left out a rank that named a colour. The Comm in use is broken.")
    total = part.all_reduce(mine, "sum").tolist()
    part.close()
    return mine.tolist(), total


STOPS: dict[str, Stop] = {
    "broadcast": Stop(
        "Rank 0's numbers go to every rank.",
        "all workers begin with the weights of rank 0.",
        _broadcast,
    ),
    "scatter": Stop(
        "Rank 0 cuts its list up and hands one piece to each rank.",
        "one reader hands each worker its share of a batch.",
        _scatter,
    ),
    "gather": Stop(
        "Every rank's numbers come together on rank 0, in rank order.",
        "rank 0 collects predictions, or the timings of all workers.",
        _gather,
    ),
    "reduce": Stop(
        "The numbers of all ranks are added up; rank 0 gets the sums.",
        "rank 0 alone reports a loss over all samples.",
        _reduce,
    ),
    "all_reduce": Stop(
        "The numbers of all ranks are added up; every rank gets the sums.",
        "the gradients of data-parallel workers (DDP), once a step.",
        _all_reduce,
    ),
    "all_gather": Stop(
        "Every rank gets the numbers of all ranks, in rank order.",
        "FSDP puts a layer's weights together just before it needs them.",
        _all_gather,
    ),
    "reduce_scatter": Stop(
        "The lists are added place by place; rank i keeps place i.",
        "FSDP adds gradients up and leaves each worker only its shard.",
        _reduce_scatter,
    ),
    "all_to_all": Stop(
        "Rank i's place j goes to rank j's place i: a transposition.",
        "tokens travel to their experts (MoE) and back.",
        _all_to_all,
    ),
    "send_recv": Stop(
        "Each rank sends to the next one and receives from the one before.",
        "a pipeline stage passes its activations on to the next stage.",
        _send_recv,
    ),
    "barrier": Stop(
        "Nobody goes on before everybody has arrived.",
        "nobody reads a checkpoint before it is written in full.",
        _barrier,
    ),
    "split": Stop(
        "Even and odd ranks form two groups, and each adds up its own numbers.",
        "a mesh: one group shards a model, another averages its copies.",
        _split,
    ),
}

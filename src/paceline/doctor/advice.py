"""Which strategy suits these machines: by the size of the model, the devices and their memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.observe.formats import count

BYTES_PER_PARAMETER = 16
"""fp32 weights and gradients, and the two moments of Adam: what must lie somewhere, whatever a batch takes beside it."""
SHARE = 0.6
"""How much of a device's memory the state may take; activations need the rest."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One case, and what suits it."""

    case: str
    command: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What there is to train on."""

    machines: int
    devices: int
    """GPUs of each machine; 0 where workers compute on the CPU."""
    device_bytes: int
    """Memory of one GPU, or of the host."""
    cores: int
    """Cores of each machine that may be used."""

    @property
    def workers(self) -> int:
        """How many workers each machine has best: one per GPU, or one per core."""
        return self.devices or max(1, self.cores)

    @property
    def total(self) -> int:
        """How many workers there are on all machines."""
        return self.workers * self.machines

    @property
    def whole(self) -> int:
        """The parameters of a model whose state fits on each worker."""
        shared = 1 if self.devices else self.workers
        return int(SHARE * self.device_bytes / shared / BYTES_PER_PARAMETER)

    @property
    def sharded(self) -> int:
        """The parameters of a model whose state fits on all workers together."""
        return self.whole * self.total


def machines_of(seen: Mapping[str, Any], machines: int, cores: float, memory: int) -> Machines:
    """Describe the machines by this one, which the others are taken to be like."""
    there = [one for one in seen["devices"] if "error" not in one]
    return Machines(
        machines=machines,
        devices=len(there),
        device_bytes=min((one["total"] for one in there), default=memory),
        cores=max(1, int(cores)),
    )


def advise(there: Machines) -> list[Advice]:
    """Return what suits, from the smallest model to the largest; `task` stands for the user's own."""
    on = f" --workers {there.workers}" if there.workers > 1 else ""
    if there.machines > 1:
        on += f" --nodes {there.machines} --rendezvous HOST:29400"
    found = [_small(there, on)]
    if there.total > 1:
        found.append(
            Advice(
                case=f"up to {_parameters(there.sharded)} parameters",
                command=f"paceline train task --strategy fsdp{on}",
                why="the weights, gradients and optimizer state of one model are spread over all workers",
            )
        )
    if there.devices == 1 and there.machines == 1:
        found.append(
            Advice(
                case=f"more than {_parameters(there.whole)} parameters",
                command="paceline train task --strategy fsdp --workers 1 --offload --activation-checkpointing blocks",
                why="weights and optimizer state wait in host memory",
            )
        )
    if there.devices > 1 or (there.machines > 1 and there.devices):
        inner = there.devices
        found.append(
            Advice(
                case="layers too large for one GPU",
                command=f"paceline train task --strategy fsdp={there.machines},tp={inner}{on}"
                if there.machines > 1
                else f"paceline train task --strategy tp{on}",
                why="tensor parallel talks in every layer, so it stays inside a machine; machines shard the rest",
            )
        )
    if there.machines > 1:
        found.append(
            Advice(
                case="a network slower than the gradients of a step",
                command=f"paceline train task --strategy local-sgd --local-steps 8{on}",
                why="workers step alone and average now and then (statistical, not bitwise); --compress bf16 is the milder way",
            )
        )
    found.append(
        Advice(
            case="sparse tables (embeddings) of millions of rows",
            command=f"paceline train task --strategy hybrid --servers 1{on}",
            why="servers hold the tables, and only the rows that a step touches travel",
        )
    )
    return found


def _small(there: Machines, on: str) -> Advice:
    case = f"up to {_parameters(there.whole)} parameters"
    if there.total == 1:
        where = "the one GPU" if there.devices else "the one core"
        return Advice(
            case=case,
            command="paceline train task --strategy single",
            why=f"{where} has nobody to share the work with",
        )
    each = "GPU" if there.devices else "core"
    return Advice(
        case=case,
        command=f"paceline train task --strategy ddp{on}",
        why=f"one worker per {each}, each with the whole model; workers may be lost and come back",
    )


def _parameters(number: int) -> str:
    return count(number) if number < 10**9 else f"{number / 10**9:.0f} billion"

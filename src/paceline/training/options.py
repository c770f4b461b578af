"""How a run is to be done: everything that is not the task itself. Made once, checked when made. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paceline import strategies
from paceline.errors import InputError, UnknownNameError

LEVELS = ("bitwise", "numeric", "statistical")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
LANES = ("auto", "memory", "gloo")
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class SaveEvery:
    """When a checkpoint is due: every so many steps, or every so many epochs."""

    steps: int | None = None
    epochs: int | None = None

    @classmethod
    def parse(cls, text: str) -> SaveEvery:
        """Read "100" or "2epochs"."""
        found = re.fullmatch(r"(\d+)\s*(steps?|epochs?)?", text.strip())
        if found is None or int(found[1]) < 1:
            raise InputError(
                f"--save-every {text!r} is neither a number of steps (100) nor of epochs (1epoch)."
            )
        count = int(found[1])
        return cls(epochs=count) if (found[2] or "").startswith("epoch") else cls(steps=count)

    def after_step(self, number: int) -> bool:
        """Say whether to save after `number` steps."""
        return self.steps is not None and number % self.steps == 0

    def after_epoch(self, epochs: int) -> bool:
        """Say whether to save after `epochs` epochs."""
        return self.epochs is not None and epochs % self.epochs == 0


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options every strategy shares."""

    strategy: str = "ddp"
    workers: int = 1
    """Processes; for a threaded strategy the threads of its one process."""
    shards: int | None = None
    exact: str | None = None
    seed: int = 0
    precision: str = "fp32"
    compile: bool = False
    sync_batchnorm: bool = False
    micro_batch: int | None = None
    loader_workers: int = 0
    allow_unused: bool = False
    device: str = "auto"
    backend: str = "auto"
    lane: str = "auto"
    check_collectives: bool = False
    out: Path | None = None
    save_every: str | None = None
    keep: int = 3
    resume: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        strategies.entry(self.strategy)
        _one_of("device", self.device, DEVICES)
        _one_of("backend", self.backend, BACKENDS)
        _one_of("lane", self.lane, LANES)
        _one_of("precision", self.precision, PRECISIONS)
        if self.exact is not None:
            _one_of("exactness", self.exact, LEVELS)
        for name in ("workers", "shards", "micro_batch", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} is {value}, but must be at least 1.")
        if self.workers > self.total_shards:
            raise InputError(
                f"{self.workers} workers for {self.total_shards} shards: some would have nothing to do. "
                f"Use --workers {self.total_shards} or fewer, or --shards {self.workers} or more."
            )
        if self.sync_batchnorm and self.micro_batch is not None:
            raise InputError(
                "--sync-batchnorm takes a worker's share in one pass, so --micro-batch cannot cut it. Leave one out."
            )
        if self.save_every is not None:
            SaveEvery.parse(self.save_every)
            if self.out is None:
                raise InputError("--save-every needs a folder to save into. Give --out.")
        if self.resume and self.out is None:
            raise InputError("--resume needs the folder of the run to resume. Give --out.")

    @property
    def total_shards(self) -> int:
        """V, the number of logical shards: fixed for the life of a run."""
        return self.shards if self.shards is not None else self.workers

    @property
    def processes(self) -> int:
        """How many processes a launcher starts."""
        known = strategies.entry(self.strategy)
        if known.processes == 1 and not known.threaded and self.workers > 1:
            raise InputError(
                f"--strategy {self.strategy} is one process, but {self.workers} workers were asked for. "
                "Use ddp, or --workers 1."
            )
        return known.processes or self.workers


def _one_of(kind: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnknownNameError(kind, value, known)

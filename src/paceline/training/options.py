"""How a run is to be done: everything that is not the task itself. Made once, checked when made. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline import strategies
from paceline.errors import InputError, UnknownNameError
from paceline.ranges import (
    COUNT,
    COUNT_OR_NONE,
    LOADERS,
    MACHINE_SECONDS,
    SECONDS,
    SEED,
    SHARDS,
    STEPS,
    Options,
    Range,
    ranged,
)
from paceline.ranges import WORKERS as WORKERS_RANGE
from paceline.strategies.tuning import Tuning

LEVELS = ("bitwise", "numeric", "statistical")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
LANES = ("auto", "memory", "gloo")
PRECISIONS = ("fp32", "bf16", "fp16")
OPTION, TASK, WORKERS = "option", "task", "workers"
"""Who said how many shards a run has; WORKERS: nobody did, and it is one per worker."""


@dataclass(frozen=True, kw_only=True)
class SaveEvery(Options):
    """When a checkpoint is due: every so many steps, or every so many epochs."""

    steps: int | None = ranged(None, STEPS)
    epochs: int | None = ranged(None, COUNT)

    @classmethod
    def parse(cls, text: str) -> SaveEvery:
        """Read "100" or "2epochs"."""
        found = re.fullmatch(r"([0-9]{1,12})\s*(steps?|epochs?)?", text.strip())
        if found is None or int(found[1]) < 1:
            raise InputError(
                f"--save-every {text!r} is neither a number of steps (100) nor of epochs (1epoch)."
            )
        count = int(found[1])
        return cls(epochs=count) if (found[2] or "").startswith("epoch") else cls(steps=count)

    def after_step(self, number: int) -> bool:
        """Return whether to save after `number` steps."""
        return self.steps is not None and number % self.steps == 0

    def after_epoch(self, epochs: int) -> bool:
        """Return whether to save after `epochs` epochs."""
        return self.epochs is not None and epochs % self.epochs == 0


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """The options every strategy shares."""

    strategy: str = "ddp"
    workers: int = ranged(1, WORKERS_RANGE)
    """Processes; for a threaded strategy the threads of its one process."""
    servers: int | None = ranged(None, WORKERS_RANGE)
    """Processes beside them that hold parameters, for strategies that have such; None is the strategy's own number."""
    shards: int | None = ranged(None, SHARDS)
    """Logical shards of a global batch; None leaves it to the task, or makes one per worker."""
    shards_from: str = ""
    """Who said so: option, task or workers. Filled in when the run is planned."""
    exact: str | None = None
    seed: int = ranged(0, SEED)
    precision: str = "fp32"
    compile: bool = False
    sync_batchnorm: bool = False
    micro_batch: int | None = ranged(None, COUNT)
    loader_workers: int = ranged(0, LOADERS)
    allow_unused: bool = False
    device: str = "auto"
    backend: str = "auto"
    lane: str = "auto"
    check_collectives: bool = False
    out: Path | None = None
    save_every: str | None = None
    keep: int = ranged(3, COUNT)
    resume: bool = False
    tensorboard: bool = False
    tuning: Tuning = field(default_factory=Tuning)
    """What single strategies may be tuned by."""
    save_async: bool = False
    """Whether training goes on while a checkpoint is written."""
    peer_copies: int = ranged(0, Range(0, 1))
    """How many other workers keep a copy of each worker's part of a state that is cut up."""
    copy_every: int = ranged(10, COUNT)
    """Steps between two such copies."""
    elastic: bool = True
    """Whether a lost worker is survived."""
    min_workers: int = ranged(1, Range(1, 2**20))
    max_restarts: int = ranged(10, COUNT_OR_NONE)
    """Workers that may be started in place of lost ones; one more is allowed again after each minute."""
    hang_timeout: float = ranged(60.0, SECONDS)
    """Seconds without progress after which a worker counts as hung."""
    rebalance: bool = False
    """Whether slower workers are given fewer shards."""
    nodes: str = "1"
    """Machines, each with `workers` workers: how many, or from how many to how many (1:4)."""
    rendezvous: str | None = None
    """Where they meet: host:port, an address of the machine that leads."""
    join_timeout: float = ranged(600.0, SECONDS)
    """Seconds until machines that have not come are not waited for any more."""
    machine_timeout: int = ranged(15, MACHINE_SECONDS)
    """Seconds without a sign of life after which a machine is given up, and ends its own workers."""

    def __post_init__(self) -> None:
        if isinstance(self.tuning, dict):  # it comes so from a file, or from another process
            object.__setattr__(self, "tuning", Tuning.made(self.tuning, "option of a strategy"))
        for name in ("nodes", "save_every"):  # 2 is as good as "2"
            if isinstance(value := getattr(self, name), int) and not isinstance(value, bool):
                object.__setattr__(self, name, str(value))
        super().__post_init__()
        if not self.shards_from:
            object.__setattr__(self, "shards_from", WORKERS if self.shards is None else OPTION)
        strategies.entry(self.strategy)
        self._check_names()
        self._check_machines()
        self._check_servers()
        self._check_workers()
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

    def _check_names(self) -> None:
        _one_of("device", self.device, DEVICES)
        _one_of("backend", self.backend, BACKENDS)
        _one_of("lane", self.lane, LANES)
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("origin of the shards", self.shards_from, (OPTION, TASK, WORKERS))
        if self.exact is not None:
            _one_of("exactness", self.exact, LEVELS)

    def _check_workers(self) -> None:
        most = self.workers * self.max_nodes
        if not 1 <= self.min_workers <= most + self.total_servers:
            raise InputError(
                f"--min-workers is {self.min_workers}, but must be from 1 to the {most + self.total_servers} workers of the run."
            )
        sizes = dict(self.choice.sizes)
        split = (sizes.get("tp") or 1) * (sizes.get("pp") or 1)
        if most // split > self.total_shards:
            fewer = max(1, self.total_shards // self.max_nodes) * split
            raise InputError(
                f"{most} workers for {self.total_shards} shards: some would have nothing to do. "
                f"Use --workers {fewer} or fewer, or --shards {most // split} or more."
            )

    def _check_servers(self) -> None:
        if self.servers is None:
            return
        if not strategies.choice(self.strategy).servers:
            owners = " or ".join(name for name, entry in strategies.STRATEGIES.items() if entry.servers)
            raise InputError(
                f"--servers is an option of {owners}, and --strategy {self.strategy} has no servers. "
                f"Use --strategy {owners}, or leave it out."
            )

    @property
    def choice(self) -> strategies.Choice:
        """The strategy, with the sizes of its mesh filled in."""
        chosen = replace(strategies.choice(self.strategy), servers=self.total_servers)
        return chosen.pinned(
            1 if strategies.entry(self.strategy).processes else self.workers * self.max_nodes
        )

    @property
    def total_servers(self) -> int:
        """How many servers stand beside the workers, on all machines."""
        return self.servers if self.servers is not None else strategies.choice(self.strategy).servers

    @property
    def total_shards(self) -> int:
        """V, the number of logical shards: fixed for the life of a run."""
        return self.shards if self.shards is not None else self.workers * self.max_nodes

    @property
    def max_nodes(self) -> int:
        """The most machines that take part."""
        return int(self.nodes.rpartition(":")[2])

    def _check_machines(self) -> None:
        if re.fullmatch(r"[0-9]{1,4}(:[0-9]{1,4})?", self.nodes) is None or self.max_nodes < 1:
            raise InputError(
                f"--nodes {self.nodes} is no number of machines. Give one, like 2, or a range, like 1:4."
            )
        if self.rendezvous is not None and strategies.entry(self.strategy).processes == 1:
            raise InputError(
                f"--strategy {self.strategy} is one process, which cannot be on several machines. Use ddp."
            )

    @property
    def processes(self) -> int:
        """How many processes a launcher starts."""
        known = strategies.entry(self.strategy)
        if known.processes == 1 and not known.threaded and self.workers > 1:
            raise InputError(
                f"--strategy {self.strategy} is one process, but {self.workers} workers were asked for. "
                "Use ddp, or --workers 1."
            )
        return known.processes or self.workers + self.total_servers


def _one_of(kind: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnknownNameError(kind, value, known)

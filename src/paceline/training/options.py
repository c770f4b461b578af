"""How a run is to be done: everything that is not the task itself. Made once, checked when made. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline import strategies
from paceline.errors import InputError, UnknownNameError
from paceline.observe.sink_catalogue import written
from paceline.option_fields import (
    CHECKPOINTS,
    DATA,
    ELASTICITY,
    MACHINES,
    NOT_COMPARED,
    PER_MACHINE,
    REPEATED,
    SPEED,
    Options,
    option,
    ranged,
)
from paceline.ranges import (
    COUNT,
    COUNT_OR_NONE,
    LOADERS,
    MACHINE_SECONDS,
    SECONDS,
    SEED,
    SHARDS,
    STEPS,
    Range,
)
from paceline.ranges import WORKERS as WORKERS_RANGE
from paceline.strategies.tuning import Tuning

LEVELS = ("bitwise", "numeric", "statistical")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl", "mpi")
TRANSPORTS = ("auto", "shm", "gloo")
CUDA_GRAPHS = ("auto", "on", "off")
PRECISIONS = ("fp32", "bf16", "fp16")
_STRATEGIES = "; ".join(f"{name}: {entry.description}" for name, entry in strategies.STRATEGIES.items())
_NODES = r"[0-9]{1,4}(:[0-9]{1,4})?"
OPTION, TASK, WORKERS = "option", "task", "workers"
"""Who said how many shards a run has; WORKERS: nobody did, and it is one per worker."""


@dataclass(frozen=True, kw_only=True)
class Every(Options):
    """When something is due, a checkpoint or an evaluation: every so many steps, or every so many epochs."""

    steps: int | None = ranged(None, STEPS)
    epochs: int | None = ranged(None, COUNT)

    @classmethod
    def parse(cls, given: int | str, option: str = "--save-every") -> Every:
        """Read 100, "100" or "2epochs"."""
        text = str(given)
        found = re.fullmatch(r"([0-9]{1,12})\s*(steps?|epochs?)?", text.strip())
        if found is None or int(found[1]) < 1:
            raise InputError(f"{option} {text!r} is neither a number of steps (100) nor of epochs (1epoch).")
        count = int(found[1])
        return cls(epochs=count) if (found[2] or "").startswith("epoch") else cls(steps=count)

    def after_step(self, number: int) -> bool:
        """Return whether it is due after `number` steps."""
        return self.steps is not None and number % self.steps == 0

    def after_epoch(self, epochs: int) -> bool:
        """Return whether it is due after `epochs` epochs."""
        return self.epochs is not None and epochs % self.epochs == 0


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """The options of a run that do not depend on what it trains."""

    strategy: str = option("ddp", f"{_STRATEGIES}. Or a mesh: ddp=2,fsdp=2; fsdp,tp=2; ddp=2,pp=2.")
    workers: int = option(
        1,
        "Processes on each machine; for dp the threads of its one process.",
        within=WORKERS_RANGE,
        shown="the mesh's, or 1",
    )
    shards: int | None = option(
        None,
        "Logical shards of a global batch, fixed for the life of a run: the bits depend on it, as on the seed, and on nothing "
        "else of the layout.",
        within=SHARDS,
        shown="the task's; one per worker where it has none",
    )
    shards_from: str = ""
    """Who said so: option, task or workers. Filled in when the run is planned."""
    exact: str | None = option(
        None,
        "bitwise, numeric or statistical; more than the strategy can give is an error.",
        names=LEVELS,
        shown="",
    )
    seed: int = option(0, "Where all randomness comes from.", within=SEED, shown="the task's")
    device: str = option("auto", "auto, cpu or cuda.", names=DEVICES)
    out: Path | None = option(  # noqa: RUF009  (a field)
        None,
        "The run folder.",
        shown="runs/TASK-TIME",
        metavar="PATH",
        marks=(PER_MACHINE, NOT_COMPARED),
    )
    resume: bool = option(
        False,
        "Go on with the run in --out, with any strategy and number of workers. What is not given again is as the run had it.",
        shown="",
    )
    num_workers: int = option(
        0, "Processes that load data for each worker.", DATA, LOADERS, shown="the task's"
    )
    micro_batch: int | None = option(
        None, "Most samples in one forward pass; the rest is accumulated.", DATA, COUNT, shown="the task's"
    )
    precision: str = option(
        "fp32", "fp32, bf16 or fp16 (CUDA only).", SPEED, names=PRECISIONS, shown="the task's"
    )
    compile: bool = option(
        False, "Compile what a step computes, the loss with the model, with torch.compile.", SPEED
    )
    cuda_graph: str = option(
        "auto",
        "Replay steps on one GPU as a CUDA graph, to the same bits: auto (where launching kernels takes the time), on or off.",
        SPEED,
        names=CUDA_GRAPHS,
    )
    sync_batchnorm: bool = option(False, "Batch statistics of the whole global batch; level numeric.", SPEED)
    transport: str = option(
        "auto",
        "How workers of one host exchange gradients: auto, shm (shared memory) or gloo (sockets).",
        SPEED,
        names=TRANSPORTS,
    )
    backend: str = option("auto", "auto, gloo, nccl or mpi (under mpirun).", SPEED, names=BACKENDS)
    find_unused_parameters: bool = False
    """Whether parameters may have no gradient in a step; a task says so."""
    check_collectives: bool = option(
        False, "Compare every collective between ranks first; slow, for debugging.", SPEED
    )
    profile: bool = option(
        False,
        "Print where the time of a step goes, and write a Chrome trace of a few steps of rank 0 into the run folder.",
        SPEED,
        marks=(PER_MACHINE, NOT_COMPARED),
    )
    save_every: int | str | None = option(
        None,
        "Checkpoint every so many steps (100) or epochs (1epoch).",
        CHECKPOINTS,
        Range(1, STEPS.high),
        shown="only at the end",
        marks=(NOT_COMPARED,),
    )
    keep: int = option(
        3,
        "How many checkpoints are kept.",
        CHECKPOINTS,
        COUNT,
        marks=(NOT_COMPARED,),
    )
    keep_best: int = option(
        1,
        "How many of the best checkpoints are kept beside those, where the run says which are best.",
        CHECKPOINTS,
        COUNT,
        marks=(NOT_COMPARED,),
    )
    save_async: bool = option(
        False,
        "Go on training while a checkpoint is written.",
        CHECKPOINTS,
        marks=(NOT_COMPARED,),
    )
    peer_snapshots: int = option(
        0,
        "Other workers that keep a copy of each worker's part of a sharded state (0 or 1).",
        CHECKPOINTS,
        Range(0, 1),
    )
    snapshot_every: int = option(10, "Steps between two such copies.", CHECKPOINTS, COUNT)
    sink: str | None = option(
        None,
        "Where metrics also go: csv, tensorboard, wandb, mlflow, or a class of yours as module:Class. May be repeated.",
        CHECKPOINTS,
        metavar="NAME",
        marks=(PER_MACHINE, NOT_COMPARED, REPEATED),
    )
    elastic: bool = option(
        True,
        "Survive lost workers: the others regroup and go on. --no-elastic ends the run instead.",
        ELASTICITY,
    )
    min_workers: int = option(
        1,
        "Go on with fewer workers down to this many.",
        ELASTICITY,
        Range(1, 2**20),
        marks=(NOT_COMPARED,),
    )
    max_restarts: int = option(
        10,
        "Workers started in place of lost ones; one more is allowed after each minute.",
        ELASTICITY,
        COUNT_OR_NONE,
    )
    hang_timeout: float = option(
        60.0,
        "Seconds without progress until a worker is replaced.",
        ELASTICITY,
        SECONDS,
        shown="60, or 10 long steps",
    )
    grace: float = option(
        30.0,
        "Seconds from SIGTERM to the end, in which the step is finished and a checkpoint saved; then all is left at once.",
        ELASTICITY,
        SECONDS,
    )
    rebalance: bool = option(False, "Give slower workers fewer shards; the bits stay.", ELASTICITY)
    nodes: int | str = option(
        "1",
        "Machines: how many, or from how many to how many (1:4).",
        MACHINES,
        Range(1, 9999),
        marks=(PER_MACHINE, NOT_COMPARED),
    )
    rendezvous: str | None = option(
        None,
        "Where machines meet: an address of the one that leads. See --nodes.",
        MACHINES,
        shown="",
        metavar="HOST:PORT",
        marks=(PER_MACHINE, NOT_COMPARED),
    )
    lead: bool | None = option(
        None,
        "Lead, though the rendezvous is no address of this machine but of a service that leads to it; --no-lead: do not, though "
        "it is one, of a tunnel's.",
        MACHINES,
        marks=(PER_MACHINE, NOT_COMPARED),
    )
    secret_file: str | None = option(
        None,
        "File with the secret that the machines of the run share.",
        MACHINES,
        shown="PACELINE_SECRET, or a new one where it leads",
        metavar="FILE",
        marks=(PER_MACHINE, NOT_COMPARED),
    )
    join_timeout: float = option(
        600.0,
        "Seconds to wait for the machines to come together.",
        MACHINES,
        SECONDS,
        marks=(PER_MACHINE, NOT_COMPARED),
    )
    machine_timeout: int = option(
        15,
        "Seconds without a sign of life after which a machine is given up.",
        MACHINES,
        MACHINE_SECONDS,
        marks=(PER_MACHINE, NOT_COMPARED),
    )
    servers: int | None = option(
        None,
        "Processes beside the workers that hold parameters.",
        "Strategies ps and hybrid",
        WORKERS_RANGE,
        shown="1",
    )
    tuning: Tuning = field(default_factory=Tuning)
    """What single strategies may be tuned by."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return some of the options as they are kept; sinks may come as a list, and as classes."""
        return super().read({**given, **({"sink": written(given["sink"])} if "sink" in given else {})})

    def __post_init__(self) -> None:
        if isinstance(self.tuning, Mapping):  # it comes so from a file, or from another process
            object.__setattr__(self, "tuning", Tuning.made(self.tuning, "option of a strategy"))
        elif not isinstance(self.tuning, Tuning):
            raise InputError(
                f"--tuning is {self.tuning!r}, but must be a mapping of names to values, or a Tuning."
            )
        super().__post_init__()
        for name in ("nodes", "save_every"):  # 2 is as good as "2"
            if isinstance(value := getattr(self, name), int):
                object.__setattr__(self, name, str(value))
        if not self.shards_from:
            object.__setattr__(self, "shards_from", WORKERS if self.shards is None else OPTION)
        strategies.entry(self.strategy)
        if self.shards_from not in (OPTION, TASK, WORKERS):
            raise UnknownNameError("origin of the shards", self.shards_from, (OPTION, TASK, WORKERS))
        self._check_machines()
        self._check_servers()
        self._check_workers()
        if self.sync_batchnorm and self.micro_batch is not None:
            raise InputError(
                "--sync-batchnorm takes a worker's share in one pass, so --micro-batch cannot cut it. Leave one out."
            )
        if self.save_every is not None:
            Every.parse(self.save_every)
            if self.out is None:
                raise InputError("--save-every needs a folder to save into. Give --out.")
        if self.profile and self.out is None:
            raise InputError("--profile needs a folder to write into. Give --out.")
        if self.resume and self.out is None:
            raise InputError("--resume needs the folder of the run to resume. Give --out.")

    def _check_workers(self) -> None:
        most = self.workers * self.max_nodes
        if not 1 <= self.min_workers <= most + self.total_servers:
            raise InputError(
                f"--min-workers is {self.min_workers}, but must be from 1 to the {most + self.total_servers} workers of the run."
            )
        split = self.choice.split
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
        return int(str(self.nodes).rpartition(":")[2])

    def _check_machines(self) -> None:
        text = str(self.nodes)
        numbers = [int(one) for one in text.split(":")] if re.fullmatch(_NODES, text) else []
        if not numbers or not 1 <= numbers[0] <= numbers[-1]:
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

"""Keeps the books of a run that has a folder: this worker's ledger, and on rank 0 the receipt and the chain."""

from __future__ import annotations

import hashlib
import inspect
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import strategies
from paceline.data import ShardedLoader
from paceline.data.permutation import EpochPermutation
from paceline.records import ledger
from paceline.records.chain import Chain
from paceline.records.receipt import NAME, Point, Receipt, Start
from paceline.recovery.position import Position
from paceline.strategies.tuning import Tuning
from paceline.task import Task
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec
from paceline.training.step import Step
from paceline.version import __version__
from paceline.world import World, broadcast_object

PACKAGE = Path(__file__).parents[1]


class NoRecords:
    """The books of a run without a folder: none."""

    def begin(self, name: str, seed: int, batch_size: int, describe: Callable[[], Start]) -> None:
        """Begin or go on with a segment of steps."""

    def regroup(
        self, world: World, name: str, seed: int, batch_size: int, describe: Callable[[], Start]
    ) -> None:
        """Go on in a new group; for each of its workers, those that have just joined it included."""

    def step(self, step: Step, position: Position) -> None:
        """Record a step that begins at `position`, before anything of it goes to another worker."""

    def before_save(self) -> None:
        """Bring every worker's ledger to the disk: no checkpoint may know more than the ledgers do."""

    def after_save(self, number: int, weights_sha256: str) -> None:
        """Add a checkpoint that is committed to the receipt."""

    def finish(self) -> None:
        """Note that the run has come to its end."""

    def close(self) -> None:
        """Let go of the files."""


class Records(NoRecords):
    """The books of a run with a folder."""

    def __init__(self, folder: Path, options: RunOptions, world: World) -> None:
        self._folder, self._options, self._world = folder, options, world
        self._ledger: ledger.Ledger | None = None
        self._receipt: Receipt | None = None
        """Rank 0 has it, and the chain."""
        self._chain: Chain | None = None

    def begin(self, name: str, seed: int, batch_size: int, describe: Callable[[], Start]) -> None:
        """Find this start's place in the run's history; all workers agree on its generation."""
        if self._world.is_first:
            self._receipt = self._opened(name, seed, batch_size, describe())
            self._receipt.write(self._folder)
        self._enter_generation()

    def regroup(
        self, world: World, name: str, seed: int, batch_size: int, describe: Callable[[], Start]
    ) -> None:
        """Take the next generation, also after a regroup that came to nothing; rank 0 may be another process now."""
        self._world = world
        before, self._receipt = self._receipt, None
        if world.is_first:
            # Another process may have been rank 0 since this one was, so the disk knows best.
            if (self._folder / NAME).exists():
                before = Receipt.read(self._folder)
            if before is None:
                self._receipt = self._first(name, seed, batch_size, describe())
            else:
                self._receipt = self._restarted(before, describe())
            self._receipt.write(self._folder, durable=False)
        self._enter_generation()

    def _enter_generation(self) -> None:
        generation = None if self._receipt is None else self._receipt.last.generation
        generation = broadcast_object(self._world.comm, generation)
        if self._ledger is None:
            self._ledger = ledger.Ledger(self._folder, self._world.rank, generation)
        self._ledger.generation = generation

    def _opened(self, name: str, seed: int, batch_size: int, start: Start) -> Receipt:
        if self._receipt is not None:
            # The loop asks for steps once more, in the same processes; it may have left one without taking it.
            return self._restarted(self._receipt, start)
        if self._options.resume and (self._folder / NAME).exists():
            receipt = self._restarted(Receipt.read(self._folder), start)
            if self._chain is not None and self._chain.step == start.step:
                self._chain.pass_by()
            return receipt
        # Ledgers that lie there without a receipt stay as they are: this start's generation is above all of theirs.
        return self._first(name, seed, batch_size, start)

    def _first(self, name: str, seed: int, batch_size: int, start: Start) -> Receipt:
        used = [origin.generation for origin in ledger.paths(self._folder)]
        if self._ledger is not None:
            used.append(self._ledger.generation)
        receipt = Receipt(
            name=name,
            seed=seed,
            shards=self._options.total_shards,
            batch_size=batch_size,
            shards_from=self._options.shards_from,
            history=(replace(start, generation=max(used, default=-1) + 1),),
        )
        self._chain = Chain(self._folder, receipt)
        return receipt

    def _restarted(self, before: Receipt, start: Start) -> Receipt:
        receipt = before.restarted(replace(start, generation=before.last.generation + 1))
        if self._chain is None or self._chain.step != receipt.linked[0]:
            self._chain = Chain(self._folder, receipt)
        return receipt

    def step(self, step: Step, position: Position) -> None:
        """Append this worker's shards to its ledger."""
        if self._ledger is not None and self._world.counts_samples:
            self._ledger.step(position.number, position.epoch, position.step, step.work.shards)

    def before_save(self) -> None:
        """Write, and wait until everybody has."""
        if self._ledger is not None:
            self._ledger.flush(durable=True)
            self._world.comm.barrier()

    def after_save(self, number: int, weights_sha256: str) -> None:
        """Carry the chain over what all ledgers gained since the last checkpoint."""
        if self._receipt is None or self._chain is None:
            return
        link = self._chain.follow(self._receipt, number)
        point = Point(weights_sha256=weights_sha256, chain=None if link is None else link.hex())
        self._receipt = self._receipt.saved(number, point)
        self._receipt.write(self._folder)

    def finish(self) -> None:
        """Write it to the receipt."""
        if self._receipt is not None:
            self._receipt = replace(self._receipt, finished=True)
            self._receipt.write(self._folder)

    def close(self) -> None:
        """Bring the ledger to its true length."""
        if self._ledger is not None:
            self._ledger.close()


def open_records(options: RunOptions, world: World) -> NoRecords:
    """Keep books where there is a folder to keep them in."""
    return NoRecords() if options.out is None else Records(options.out, options, world)


@dataclass(frozen=True)
class DataFacts:
    """What the books say of the data of a call of `steps`, known to a worker that has not come there itself."""

    batch_size: int
    samples: int | None
    steps_per_epoch: int | None
    order: EpochPermutation | None

    @classmethod
    def of(cls, feed: ShardedLoader) -> DataFacts:
        """Return the facts of the data that another worker has open."""
        return cls(feed.batch_size, feed.samples, feed.steps_per_epoch, feed.order)


def describe_start(
    options: RunOptions,
    world: World,
    position: Position,
    feed: ShardedLoader | DataFacts,
    *,
    exactness: str,
    max_grad_norm: float | None,
    transport: str = "",
    about: Mapping[str, Any],
) -> Start:
    """Write down where a run starts from and everything that its bits depend on."""
    order = feed.order
    threaded = strategies.entry(options.strategy).threaded
    return Start(
        generation=0,
        step=position.number,
        epoch=position.epoch,
        step_of_epoch=position.step,
        strategy=options.strategy,
        workers=options.workers if threaded else world.size - world.mesh.servers,
        processes=world.size,
        mesh=str(world.mesh) if world.dp_size != world.size else "",
        shares=world.shares,
        exactness=exactness,
        stream=order is None,
        samples=feed.samples,
        shuffle=order is not None and order.shuffle,
        order_seed=options.seed if order is None else order.seed,
        precision=options.precision,
        compile=options.compile,
        micro_batch=options.micro_batch,
        num_workers=options.num_workers,
        find_unused_parameters=options.find_unused_parameters,
        sync_batchnorm=options.sync_batchnorm,
        transport_asked=options.transport,
        transport=transport,
        tuning={
            name: value for name, value in asdict(options.tuning).items() if value != getattr(Tuning, name)
        },
        max_grad_norm=max_grad_norm,
        **{"task": None, "settings": {}, "sources": {}, "horizon": None, **about},
        device=world.device.type,
        device_name=_device_name(world.device),
        threads=torch.get_num_threads(),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "paceline": __version__,
        },
        paceline_sha256=package_sha256(),
    )


def about_task(task: Task, spec: TrainSpec, horizon: int | None) -> dict[str, Any]:
    """Return what a receipt says of a task: how to make it again, and what its source was."""
    files = {
        file
        for kind in type(task).__mro__
        if issubclass(kind, Task) and kind is not Task and (file := inspect.getsourcefile(kind))
    }
    sources = {
        str(Path(file).resolve()): hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for file in sorted(files)
    }
    return {"task": spec.task, "settings": dict(spec.settings), "sources": sources, "horizon": horizon}


@cache
def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@cache
def package_sha256() -> str:
    """Return the hash of this package's source: some 400 files, which the fork server reads once for all its workers."""
    made = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        made.update(f"{path.relative_to(PACKAGE)}\0".encode())
        made.update(path.read_bytes())
    return made.hexdigest()

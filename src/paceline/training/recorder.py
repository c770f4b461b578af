"""Keeps the books of a run that has a folder: this worker's ledger, and on rank 0 the receipt."""

from __future__ import annotations

import hashlib
import inspect
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint import weights_sha256
from paceline.data import Feed
from paceline.task import Task
from paceline.training import ledger
from paceline.training.options import RunOptions
from paceline.training.position import Position
from paceline.training.receipt import FIRST_LINK, NAME, Point, Receipt, Start
from paceline.training.spec import TrainSpec
from paceline.training.step import Step
from paceline.version import __version__
from paceline.world import World, broadcast_object

PACKAGE = Path(__file__).parents[1]


class NoRecords:
    """The books of a run without a folder: none."""

    def begin(self, name: str, seed: int, batch_size: int, describe: Callable[[], Start]) -> None:
        """Begin or go on with a stretch of steps."""

    def step(self, step: Step, position: Position) -> None:
        """Record a step that has been applied; `position` is where the run stood before it."""

    def before_save(self) -> None:
        """Bring every worker's ledger to the disk: no checkpoint may know more than the ledgers do."""

    def after_save(self, number: int, model: Mapping[str, Tensor]) -> None:
        """Add a checkpoint to the receipt."""

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
        self._read: dict[int, int] = {}
        """How many records of each rank's ledger the chain has passed already."""
        self._link: bytes | None = FIRST_LINK
        self._linked = 0
        """The step up to which the chain goes."""

    def begin(self, name: str, seed: int, batch_size: int, describe: Callable[[], Start]) -> None:
        """Find this start's place in the run's history; all workers agree on its generation."""
        if self._world.is_first:
            self._receipt = self._opened(name, seed, batch_size, describe())
            self._receipt.write(self._folder)
        generation = None if self._receipt is None else self._receipt.last.generation
        generation = broadcast_object(self._world.comm, generation)
        if self._ledger is None:
            self._ledger = ledger.Ledger(self._folder, self._world.rank, generation)

    def _opened(self, name: str, seed: int, batch_size: int, start: Start) -> Receipt:
        if self._receipt is not None:  # the loop asks for steps once more, in the same processes
            return self._receipt.restarted(replace(start, generation=self._receipt.last.generation))
        if self._options.resume and (self._folder / NAME).exists():
            before = Receipt.read(self._folder)
            self._read = {rank: ledger.count(path) for rank, path in ledger.paths(self._folder).items()}
            self._link, self._linked = link_at(self._folder, before, start.step), start.step
            return before.restarted(replace(start, generation=before.last.generation + 1))
        # A run that was killed before its first checkpoint may have left some; they belong to nothing now.
        shutil.rmtree(self._folder / ledger.FOLDER, ignore_errors=True)
        self._linked = start.step
        self._link = FIRST_LINK if start.step == 0 else None
        return Receipt(
            name=name,
            seed=seed,
            shards=self._options.total_shards,
            batch_size=batch_size,
            history=(start,),
        )

    def step(self, step: Step, position: Position) -> None:
        """Append this worker's shards to its ledger."""
        if self._ledger is not None:
            self._ledger.step(position.number, position.epoch, position.step, step.work.shards)

    def before_save(self) -> None:
        """Write, and wait until everybody has."""
        if self._ledger is not None:
            self._ledger.flush(durable=True)
            self._world.comm.barrier()

    def after_save(self, number: int, model: Mapping[str, Tensor]) -> None:
        """Carry the chain over what all ledgers gained since the last checkpoint."""
        if self._receipt is None:
            return
        if number > self._linked:
            gained = []
            for rank, path in ledger.paths(self._folder).items():
                gained.append(ledger.read(path, self._read.get(rank, 0)))
                self._read[rank] = self._read.get(rank, 0) + len(gained[-1])
            steps = range(self._linked, number)
            shards = self._receipt.shards
            if self._link is not None:
                self._link = ledger.chain(self._link, np.concatenate(gained), shards, steps)
            self._linked = number
        chained = None if self._link is None else self._link.hex()
        point = Point(weights_sha256=weights_sha256(model), chain=chained)
        self._receipt = self._receipt.saved(number, point)
        self._receipt.write(self._folder)

    def finish(self) -> None:
        """Say so in the receipt."""
        if self._ledger is not None:
            self._ledger.flush()
        if self._receipt is not None:
            self._receipt = replace(self._receipt, finished=True)
            self._receipt.write(self._folder)

    def close(self) -> None:
        """Write the rest of the ledger."""
        if self._ledger is not None:
            self._ledger.close()


def open_records(options: RunOptions, world: World) -> NoRecords:
    """Keep books where there is a folder to keep them in."""
    return NoRecords() if options.out is None else Records(options.out, options, world)


def link_at(folder: Path, receipt: Receipt, step: int) -> bytes | None:
    """Give the chain's link at a checkpoint, from the ledgers where the receipt was not written any more."""
    point = receipt.checkpoints.get(step)
    if point is not None:
        return None if point.chain is None else bytes.fromhex(point.chain)
    known = max(
        (number for number, one in receipt.checkpoints.items() if number < step and one.chain), default=0
    )
    link = bytes.fromhex(receipt.checkpoints[known].chain or "") if known else FIRST_LINK
    found = [ledger.read(path) for path in ledger.paths(folder).values()]
    if not found:
        return link if known == step else None
    records = np.concatenate(found)
    stretches = receipt.stretches
    mine = ledger.belonging(
        records, [start.step for start in stretches], [start.generation for start in stretches]
    )
    return ledger.chain(link, records[mine], receipt.shards, range(known, step))


def describe_start(
    options: RunOptions,
    world: World,
    position: Position,
    feed: Feed,
    *,
    exactness: str,
    clip: float | None,
    about: Mapping[str, Any],
) -> Start:
    """Write down where a run starts from and everything that its bits depend on."""
    order = feed.order
    return Start(
        generation=0,
        step=position.number,
        epoch=position.epoch,
        step_of_epoch=position.step,
        strategy=options.strategy,
        workers=options.workers,
        processes=world.size,
        exactness=exactness,
        stream=order is None,
        samples=feed.samples,
        shuffle=order is not None and order.shuffle,
        order_seed=options.seed if order is None else order.seed,
        precision=options.precision,
        compile=options.compile,
        micro_batch=options.micro_batch,
        loader_workers=options.loader_workers,
        allow_unused=options.allow_unused,
        sync_batchnorm=options.sync_batchnorm,
        lane=options.lane,
        clip=clip,
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
        paceline_sha256=_package_sha256(),
    )


def about_task(task: Task, spec: TrainSpec, horizon: int | None) -> dict[str, Any]:
    """Give what a receipt says of a task: how to make it again, and what its source was."""
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


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _package_sha256() -> str:
    made = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        made.update(f"{path.relative_to(PACKAGE)}\0".encode())
        made.update(path.read_bytes())
    return made.hexdigest()

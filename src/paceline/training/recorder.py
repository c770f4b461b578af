"""Keeps the records of a run that has a folder: this worker's ledger, and on rank 0 the receipt and the hash chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.data import ShardedLoader
from paceline.data.permutation import EpochPermutation
from paceline.errors import RecordsError
from paceline.records import ledger
from paceline.records.chain import Chain
from paceline.records.receipt import NAME, Point, Receipt, RunSegment
from paceline.recovery.position import Position
from paceline.training.options import RunOptions
from paceline.training.step import Step
from paceline.world import World, broadcast_object


class NoRecords:
    """The records of a run without a folder: none."""

    def begin(self, describe: Callable[[], Receipt]) -> None:
        """Begin or go on with a segment of steps; `describe` returns the receipt of a run that begins with it."""

    def regroup(self, world: World, describe: Callable[[], Receipt]) -> None:
        """Continue in a new group; for each of its workers, those that have just joined it included."""

    def step(self, step: Step, position: Position) -> None:
        """Record a step that begins at `position`, before anything of it goes to another worker."""

    def before_save(self) -> None:
        """Bring every worker's ledger to the disk: no checkpoint may know more than the ledgers do."""

    def after_save(self, number: int, weights_sha256: str) -> None:
        """Add a checkpoint that is committed to the receipt."""

    def finish(self) -> None:
        """Note that the run has come to its end."""

    def close(self) -> None:
        """Release the files."""


class Records(NoRecords):
    """The records of a run with a folder."""

    def __init__(self, folder: Path, world: World, *, resume: bool, note: Callable[[str], None]) -> None:
        """`note` tells the user something in a line."""
        self._folder, self._world, self._resume, self._note = folder, world, resume, note
        self._unwritten = False
        """Whether the disk did not take the receipt when it was written last."""
        self._ledger: ledger.Ledger | None = None
        self._receipt: Receipt | None = None
        """Rank 0 has it, and the chain."""
        self._chain: Chain | None = None

    def begin(self, describe: Callable[[], Receipt]) -> None:
        """Find this start's place in the run's history; all workers agree on its generation."""
        if self._world.is_first:
            self._receipt = self._opened(describe())
            self._write(self._receipt)
        self._enter_generation()

    def regroup(self, world: World, describe: Callable[[], Receipt]) -> None:
        """Take the next generation, also after a regroup that came to nothing; rank 0 may be another process now."""
        self._world = world
        before, self._receipt = self._receipt, None
        if world.is_first:
            # Another process may have been rank 0 since this one was, so the disk knows best.
            if (self._folder / NAME).exists() and not self._unwritten:
                before = Receipt.read(self._folder)
            made = describe()
            self._receipt = self._first(made) if before is None else self._restarted(before, made.last)
            self._write(self._receipt, durable=False)
        self._enter_generation()

    def _write(self, receipt: Receipt, *, durable: bool = True) -> None:
        """Write the receipt; where the disk does not take it the run goes on, and it is written whole the next time."""
        try:
            receipt.write(self._folder, durable=durable)
        except RecordsError as error:
            if not self._unwritten:
                self._note(f"{error} The run goes on, and tries again at the next checkpoint.")
            self._unwritten = True
        else:
            self._unwritten = False

    def _enter_generation(self) -> None:
        generation = None if self._receipt is None else self._receipt.last.generation
        generation = broadcast_object(self._world.comm, generation)
        if self._ledger is None:
            self._ledger = ledger.Ledger(self._folder, self._world.rank, generation)
        self._ledger.generation = generation

    def _opened(self, made: Receipt) -> Receipt:
        start = made.last
        if self._receipt is not None:
            # The loop asks for steps once more, in the same processes; it may have left one without taking it.
            return self._restarted(self._receipt, start)
        if self._resume and (self._folder / NAME).exists():
            receipt = self._restarted(Receipt.read(self._folder), start)
            if self._chain is not None and self._chain.step == start.step:
                self._chain.pass_by()
            return receipt
        # Ledgers that lie there without a receipt stay as they are: this start's generation is above all of theirs.
        return self._first(made)

    def _first(self, made: Receipt) -> Receipt:
        used = [origin.generation for origin in ledger.paths(self._folder)]
        if self._ledger is not None:
            used.append(self._ledger.generation)
        receipt = replace(made, history=(replace(made.last, generation=max(used, default=-1) + 1),))
        self._chain = Chain(self._folder, receipt)
        return receipt

    def _restarted(self, before: Receipt, start: RunSegment) -> Receipt:
        # The disk may not have taken the receipt of a generation that this worker's ledger knows.
        used = before.last.generation if self._ledger is None else self._ledger.generation
        generation = max(before.last.generation, used) + 1
        receipt = before.restarted(replace(start, generation=generation))
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
            self._ledger.flush()
            self._world.comm.barrier()

    def after_save(self, number: int, weights_sha256: str) -> None:
        """Extend the hash chain by the records that all ledgers gained since the last checkpoint."""
        if self._receipt is None or self._chain is None:
            return
        link = self._chain.follow(self._receipt, number)
        point = Point(weights_sha256=weights_sha256, chain=None if link is None else link.hex())
        self._receipt = self._receipt.saved(number, point)
        self._write(self._receipt)

    def finish(self) -> None:
        """Write it to the receipt."""
        if self._receipt is not None:
            self._receipt = replace(self._receipt, finished=True)
            self._write(self._receipt)

    def close(self) -> None:
        """Bring the ledger to its true length."""
        if self._ledger is not None:
            self._ledger.close()


def open_records(options: RunOptions, world: World, note: Callable[[str], None]) -> NoRecords:
    """Return the records of a run; without a folder there are none."""
    if options.out is None:
        return NoRecords()
    return Records(options.out, world, resume=options.resume, note=note)


@dataclass(frozen=True)
class DataFacts:
    """What the records say of the data of a call of `steps`, known to a worker that has not come there itself."""

    batch_size: int
    samples: int | None
    steps_per_epoch: int | None
    order: EpochPermutation | None
    uneven: bool
    repeats: int = 1

    @classmethod
    def of(cls, loader: ShardedLoader) -> DataFacts:
        """Return the facts about the data of a loader."""
        return cls(
            loader.batch_size,
            loader.samples,
            loader.steps_per_epoch,
            loader.order,
            loader.uneven,
            loader.repeats,
        )

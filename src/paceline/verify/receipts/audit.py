"""Audits a run from its ledgers: was every sample used exactly once an epoch, whatever happened to the workers?

The receipt says which samples each shard of each step must have held; the ledgers say what was served, and by whom.
Distinct positions of an epoch hold distinct samples, so if each (step, shard) was served once, with the digest that
its place in the order gives, then each sample was used once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline import strategies
from paceline.data.permutation import EpochPermutation
from paceline.data.shards import owned_shards, steps_per_epoch
from paceline.errors import InputError
from paceline.ranges import SAMPLES
from paceline.records import ledger
from paceline.records.receipt import FIRST_LINK, Receipt, RunSegment
from paceline.verify.receipts.audit_report import AuditReport
from paceline.verify.receipts.kept_weights import check_kept
from paceline.verify.receipts.ledgers import Ledgers, Whole
from paceline.world.mesh import DATA, Mesh

BLOCK_SAMPLES = 2**20
"""The order is computed for about so many samples at once: 8 MB of ids, whatever the size of the data set."""


def audit(folder: Path) -> AuditReport:
    """Compare the ledgers of a run folder with the order of its data, up to the last checkpoint."""
    receipt = Receipt.read(folder)
    if not receipt.steps:
        raise InputError(
            f"the run in {folder} has no checkpoint yet, so no step of it is kept and there is nothing to audit. "
            "Train with --save-every, or wait for its end."
        )
    kept, faults = check_kept(folder, receipt)
    return _Audit(receipt, Ledgers.read(folder, receipt), kept, faults).report()


@dataclass(frozen=True)
class _StepRange:
    """Some consecutive steps of one epoch, and how large each was."""

    number: int
    epoch: int
    step: int
    sizes: Whole


@dataclass(frozen=True)
class _Gap:
    """Many consecutive steps of which no ledger holds anything."""

    number: int
    steps: int
    samples: int
    """How many they would have held."""
    ends_at: tuple[int, int]
    """Epoch, and steps of it, after them."""


@dataclass
class _Audit:
    """One audit in progress."""

    receipt: Receipt
    ledgers: Ledgers
    kept: list[int]
    """Steps whose checkpoints were there to be compared."""
    faults: list[str]
    """What is wrong with them."""
    problems: list[str] = field(default_factory=list)
    samples: int = 0
    lost: int = 0
    repeated: int = 0
    twice: int = 0
    wrong: int = 0

    def report(self) -> AuditReport:
        """Check every segment, then the chain."""
        receipt, ledgers = self.receipt, self.ledgers
        starts = receipt.segments
        ends = [*(start.step for start in starts[1:]), receipt.steps]
        if starts[0].step > 0:
            self.problems.append(
                f"steps 0 to {starts[0].step - 1} are in no start that the receipt knows: it begins at step {starts[0].step}"
            )
        if ledgers.misplaced:
            self.problems.append(
                f"{ledgers.misplaced} records name a shard beyond the run's {receipt.shards}"
            )
        position, left_early = (0, 0), 0
        for start, end, after in zip(starts, ends, [*starts[1:], None], strict=True):
            for span in self._step_ranges(start, min(end, receipt.steps)):
                if isinstance(span, _Gap):
                    self._miss(span)
                    position = span.ends_at
                    continue
                self._check(span, start)
                position = (span.epoch, span.step + len(span.sizes))
            if after is not None and after.epoch > position[0] and start.samples:
                # A loop of its own may leave an epoch and begin another one.
                left_early += position[1] < steps_per_epoch(start.samples, receipt.batch_size) * start.repeats
        self._check_chain()
        self.problems += [*ledgers.strange, *self.faults]
        last = starts[-1]
        if not last.stream and last.samples:
            per_epoch = steps_per_epoch(last.samples, receipt.batch_size) * last.repeats
            position = (position[0] + position[1] // per_epoch, position[1] % per_epoch)
        return AuditReport(
            name=receipt.name,
            steps=receipt.steps,
            epochs=position[0] - left_early,
            steps_of_next_epoch=position[1],
            shards=receipt.shards,
            samples=self.samples,
            lost=self.lost,
            repeated=self.repeated,
            served_twice=self.twice,
            served_wrongly=self.wrong,
            by_rank=ledgers.by_rank(),
            workers=[(start.step, start.workers, start.strategy) for start in starts],
            superseded=ledgers.superseded,
            beyond=ledgers.beyond,
            stream=any(start.stream for start in starts),
            finished=receipt.finished,
            kept=self.kept,
            problems=self.problems,
        )

    # What must have been served.

    def _step_ranges(self, start: RunSegment, end: int) -> Iterator[_StepRange | _Gap]:
        """Split a segment into ranges of steps, each of one epoch and a bounded number of samples, and longer gaps."""
        batch = self.receipt.batch_size
        most = max(1, BLOCK_SAMPLES // max(batch, self.receipt.shards))
        if start.stream:
            yield from self._stream_ranges(start, end, most)
            return
        samples, times = start.samples or 0, start.repeats
        per_epoch = steps_per_epoch(samples, batch) * times

        def place(number: int) -> tuple[int, int]:
            epochs, step = divmod(start.step_of_epoch + number - start.step, per_epoch)
            return start.epoch + epochs, step

        def before(number: int) -> int:
            epoch, step = place(number)
            whole, turns = divmod(step, times)
            return (epoch * samples + whole * batch) * times + turns * min(batch, samples - whole * batch)

        for first, last, there in self.ledgers.served(start.step, end):
            if not there:
                yield _Gap(first, last - first, before(last) - before(first), place(last))
                continue
            number = first
            while number < last:
                epoch, step = place(number)
                steps = min(most, per_epoch - step, last - number)
                begins = np.arange(step, step + steps, dtype=np.int64) // times * batch
                yield _StepRange(number, epoch, step, np.minimum(batch, samples - begins))
                number += steps

    def _stream_ranges(self, start: RunSegment, end: int, most: int) -> Iterator[_StepRange | _Gap]:
        """Take epochs and the size of each epoch's last step from the ledger: only the stream knew where it ended."""
        # One step further than the segment: whether its last step may be a short one depends on what follows.
        records = self.ledgers.records[self.ledgers.between(start.step, end + 1)]
        numbers, first = np.unique(records["number"], return_index=True)
        seen = dict(zip(numbers.tolist(), records[["epoch", "step"]][first].tolist(), strict=True))
        epoch, step = start.epoch, start.step_of_epoch
        furthest = SAMPLES.high // self.receipt.batch_size - self.receipt.steps
        for low, high, served in self.ledgers.served(start.step, end):
            if not served:
                step += high - low
                yield _Gap(low, high - low, (high - low) * self.receipt.batch_size, (epoch, step))
                continue
            span: list[tuple[int, int, int]] = []
            for number in range(low, high):
                there = seen.get(number, (epoch, step))
                closes_epoch = there[0] == epoch + 1
                if closes_epoch and there[1]:
                    self.problems.append(
                        f"step {number}: epoch {there[0]} begins at its step {there[1]}, so what came before is lost"
                    )
                if span and (closes_epoch or (len(span) >= most and step % start.repeats == 0)):
                    yield self._sized(span, start, closes_epoch=closes_epoch)
                    span = []
                if closes_epoch:
                    epoch, step = there[0], min(there[1], furthest)
                span.append((number, epoch, step))
                step += 1
            closes = seen.get(high, (-1, 0))[0] != epoch
            yield self._sized(span, start, closes_epoch=closes)

    def _sized(
        self, steps: Sequence[tuple[int, int, int]], start: RunSegment, *, closes_epoch: bool
    ) -> _StepRange:
        sizes = np.full(len(steps), self.receipt.batch_size, dtype=np.int64)
        last, unknown = len(steps) - 1, range(0)
        if start.uneven:
            unknown = range(len(steps))
        elif closes_epoch:
            unknown = range(max(0, last - steps[-1][2] % start.repeats), len(steps))
        for place in unknown:
            # A short last batch is as long in each of its steps: one of them that is lost is not taken for a whole one.
            number = steps[place if start.uneven else last][0]
            served = self.ledgers.records[self.ledgers.between(number, number + 1)]
            _, once = np.unique(served["shard"], return_index=True)
            if len(served) and len(once) == self.receipt.shards:
                sizes[place] = min(self.receipt.batch_size, int(served["count"][once].sum()))
        return _StepRange(*steps[0], sizes)

    def _cuts(self, span: _StepRange, times: int) -> Whole:
        """Return where each shard of each step begins and ends, counted from the first sample of the range."""
        batch, shards = self.receipt.batch_size, self.receipt.shards
        numbers = np.arange(span.step, span.step + len(span.sizes), dtype=np.int64)[:, None]
        begins = (numbers // times - span.step // times) * batch
        return begins + np.arange(shards + 1, dtype=np.int64) * span.sizes[:, None] // shards

    def _digests(self, span: _StepRange, start: RunSegment, cuts: Whole) -> NDArray[np.uint64]:
        """Return the digest of the samples that each (step, shard) must have held."""
        low = span.step // start.repeats * self.receipt.batch_size
        high = low + int(cuts[-1, -1])
        order = EpochPermutation(
            high if start.stream else start.samples or 0, start.order_seed, start.shuffle
        )
        ids = memoryview(order.indices(span.epoch, low, high).tobytes())
        digests = b"".join(
            ledger.digest(ids[begin:end]) for row in (cuts * 8).tolist() for begin, end in pairwise(row)
        )
        return np.frombuffer(digests, dtype="<u8").reshape(-1, 2)

    # What was served.

    def _check(self, span: _StepRange, start: RunSegment) -> None:
        shards = self.receipt.shards
        cuts = self._cuts(span, start.repeats)
        counts = np.diff(cuts, axis=1).ravel()
        place = self.ledgers.between(span.number, span.number + len(span.sizes))
        records, sources = self.ledgers.records[place], self.ledgers.sources[place]
        steps = records["number"].astype(np.int64) - span.number
        cells = steps * shards + records["shard"]
        # Where no count is right, no digest is: a batch that nobody served may be larger than the memory.
        fitting = records["count"] == counts[cells]
        digests = self._digests(span, start, cuts) if fitting.any() else np.zeros((len(counts), 2), "<u8")
        right = (
            fitting
            & (records["digest"] == digests[cells]).all(axis=1)
            & (records["epoch"] == span.epoch)
            & (records["step"].astype(np.int64) == span.step + steps)
        )
        times = np.bincount(cells, minlength=len(counts))
        rightly = np.bincount(cells[right], minlength=len(counts))
        self.samples += int(counts[rightly > 0].sum())
        self.lost += int(counts[rightly == 0].sum())
        self.repeated += int((counts * np.maximum(rightly - 1, 0)).sum())
        self.twice += int((times > 1).sum())
        self.wrong += int((~right).sum())
        faults = [
            *((cell, self._missing(cell, counts, start)) for cell in np.flatnonzero(times == 0).tolist()),
            *((cell, self._twice(cell, cells, sources)) for cell in np.flatnonzero(times > 1).tolist()),
            *(
                (int(cells[index]), self._fault(records[index], sources[index], counts[cells[index]]))
                for index in np.flatnonzero(~right).tolist()
            ),
        ]
        for cell, fault in sorted(faults):
            step, shard = divmod(cell, shards)
            self.problems.append(f"step {span.number + step}, shard {shard}: {fault}")

    def _miss(self, gap: _Gap) -> None:
        self.lost += gap.samples
        self.problems.append(
            f"steps {gap.number} to {gap.number + gap.steps - 1}: on no ledger, so {gap.samples} samples are lost"
        )

    def _missing(self, cell: int, counts: Whole, start: RunSegment) -> str:
        shards = self.receipt.shards
        mesh = (
            strategies.choice(start.mesh).fitted(start.processes)
            if start.mesh
            else Mesh.flat(start.processes)
        )
        hands = mesh.size(*DATA)
        owner = next(
            rank
            for rank in range(start.processes)
            if cell % shards in owned_shards(mesh.index(rank, *DATA), hands, shards, start.shares)
        )
        return f"on no ledger, so {counts[cell]} samples are lost; it was for rank {owner} to serve"

    def _twice(self, cell: int, cells: Whole, sources: Whole) -> str:
        low, high = np.searchsorted(cells, [cell, cell + 1]).tolist()
        by = " and ".join(str(self.ledgers.origins[source]) for source in sources[low:high].tolist())
        return f"served {high - low} times, by {by}"

    def _fault(self, record: np.void, source: np.int64, wanted: np.int64) -> str:
        origin = self.ledgers.origins[source]
        if int(record["count"]) != wanted:
            return f"{origin} served {record['count']} samples where the order gives {wanted}"
        return f"{origin} served other samples than the order gives"

    def _check_chain(self) -> None:
        link, number = FIRST_LINK, 0
        for step, point in sorted(self.receipt.checkpoints.items()):
            records = self.ledgers.records[self.ledgers.between(number, step)]
            made = ledger.chain(link, records, self.receipt.shards, range(number, step))
            if made is None:
                self.problems.append(f"the chain of samples cannot be followed up to step {step}: see above")
                return
            if point.chain is None:
                self.problems.append(f"the receipt holds no chain at step {step}")
            elif made.hex() != point.chain:
                self.problems.append(
                    f"the chain of samples at step {step} is not the one in the receipt: one of them was changed"
                )
                return
            link, number = made, step

"""Audits a run from its ledgers: was every sample used exactly once an epoch, whatever happened to the workers?

The receipt says which samples each shard of each step must have held; the ledgers say what was served, and by whom.
Distinct positions of an epoch hold distinct samples, so if each (step, shard) was served once, with the digest that
its place in the order gives, then each sample was used once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline import strategies
from paceline.data.order import Order
from paceline.data.shards import owned_shards, steps_per_epoch
from paceline.errors import InputError
from paceline.training import ledger
from paceline.training.receipt import FIRST_LINK, Receipt, Start
from paceline.verify.audit_report import Audit
from paceline.verify.kept_weights import check_kept
from paceline.world.mesh import DATA, Mesh

BLOCK_SAMPLES = 2**20
"""The order is computed for about so many samples at once: 8 MB of ids, whatever the size of the data set."""

_Whole: TypeAlias = NDArray[np.int64]


def audit(folder: Path) -> Audit:
    """Compare the ledgers of a run folder with the order of its data, up to the last checkpoint."""
    receipt = Receipt.read(folder)
    if not receipt.steps:
        raise InputError(
            f"the run in {folder} has no checkpoint yet, so no step of it is kept and there is nothing to audit. "
            "Train with --save-every, or wait for its end."
        )
    kept, faults = check_kept(folder, receipt)
    return _Audit(receipt, _Book.read(folder, receipt), kept, faults).report()


@dataclass
class _Book:
    """The records of all ledgers that led to the last checkpoint, in order of (step, shard)."""

    records: ledger.Records
    sources: _Whole
    """Which of `origins` each record is from."""
    origins: list[ledger.Origin]
    superseded: int
    """Records of steps that were taken again."""
    strange: list[str]
    """A line for each ledger with records that no process of this run can have made."""
    beyond: int
    """Steps after the last checkpoint."""
    misplaced: int
    """Records of a shard that the run does not have."""

    @classmethod
    def read(cls, folder: Path, receipt: Receipt) -> _Book:
        """Read every ledger; what belongs to no kept step is only counted."""
        found = {origin: ledger.read(path) for origin, path in ledger.paths(folder).items()}
        if not found:
            raise InputError(f"there is no ledger in {folder / ledger.FOLDER}, so nothing can be audited.")
        records = np.concatenate(list(found.values()))
        sources = np.repeat(np.arange(len(found), dtype=np.int64), [len(one) for one in found.values()])
        generations = {start.generation: start.step for start in receipt.history}
        strange = {origin: _strange(one, generations) for origin, one in found.items()}
        stretches = receipt.stretches
        led = ledger.belonging(
            records, [start.step for start in stretches], [start.generation for start in stretches]
        )
        behind = records["number"] >= receipt.steps
        placed = records["shard"] < receipt.shards
        kept = np.flatnonzero(led & ~behind & placed)
        kept = kept[np.lexsort((records["shard"][kept], records["number"][kept]))]
        return cls(
            records=records[kept],
            sources=sources[kept],
            origins=list(found),
            superseded=int((~led).sum()),
            strange=[
                *(
                    f"the ledger of {origin} holds {count} records that belong to no start of this run"
                    for origin, count in strange.items()
                    if count
                ),
                *(
                    f"the ledger of {origin} goes on for {more} records behind one that was never finished"
                    for origin, path in ledger.paths(folder).items()
                    if (more := ledger.behind_the_end(path)) > receipt.shards
                ),
            ],
            beyond=len(np.unique(records["number"][led & behind])),
            misplaced=int((led & ~behind & ~placed).sum()),
        )

    def by_rank(self) -> dict[int, int]:
        """Count the samples of each rank; a process that had several is counted under its first."""
        served = np.bincount(self.sources, weights=self.records["count"], minlength=len(self.origins))
        total: dict[int, int] = {}
        for origin, count in zip(self.origins, served.tolist(), strict=True):
            if count:
                total[origin.rank] = total.get(origin.rank, 0) + int(count)
        return total

    def between(self, first: int, last: int) -> slice:
        """Give the place of the records of the steps [first, last)."""
        low, high = np.searchsorted(self.records["number"], np.array([first, last], dtype=np.uint64))
        return slice(int(low), int(high))


def _strange(records: ledger.Records, generations: dict[int, int]) -> int:
    """Count the records of generations that the receipt should know and does not, or of steps before their start.

    A ledger from before the receipt's first start is no fault: somebody removed an older receipt, as its errors advise.
    """
    known = np.array(sorted(generations), dtype=np.int64)
    begins = np.array([generations[int(one)] for one in known], dtype=np.uint64)
    theirs = records["generation"].astype(np.int64)
    place = np.clip(np.searchsorted(known, theirs), 0, len(known) - 1)
    missing = (known[place] != theirs) & (theirs > known[0])
    early = (known[place] == theirs) & (records["number"] < begins[place])
    return int((missing | early).sum())


@dataclass(frozen=True)
class _Piece:
    """Some consecutive steps of one epoch, and how large each was."""

    number: int
    epoch: int
    step: int
    sizes: _Whole


@dataclass
class _Audit:
    """One audit under way."""

    receipt: Receipt
    book: _Book
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

    def report(self) -> Audit:
        """Check every stretch, then the chain."""
        receipt, book = self.receipt, self.book
        starts = receipt.stretches
        ends = [*(start.step for start in starts[1:]), receipt.steps]
        if starts[0].step > 0:
            self.problems.append(
                f"steps 0 to {starts[0].step - 1} are in no start that the receipt knows: it begins at step {starts[0].step}"
            )
        if book.misplaced:
            self.problems.append(f"{book.misplaced} records name a shard beyond the run's {receipt.shards}")
        position, left_early = (0, 0), 0
        for start, end, after in zip(starts, ends, [*starts[1:], None], strict=True):
            for piece in self._pieces(start, min(end, receipt.steps)):
                self._check(piece, start)
                position = (piece.epoch, piece.step + len(piece.sizes))
            if after is not None and after.epoch > position[0] and start.samples:
                # A loop of its own may leave an epoch and begin another one.
                left_early += position[1] < steps_per_epoch(start.samples, receipt.batch_size)
        self._check_chain()
        self.problems += [*book.strange, *self.faults]
        last = starts[-1]
        if not last.stream and last.samples:
            per_epoch = steps_per_epoch(last.samples, receipt.batch_size)
            position = (position[0] + position[1] // per_epoch, position[1] % per_epoch)
        return Audit(
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
            by_rank=book.by_rank(),
            workers=[(start.step, start.workers, start.strategy) for start in starts],
            superseded=book.superseded,
            beyond=book.beyond,
            stream=any(start.stream for start in starts),
            finished=receipt.finished,
            kept=self.kept,
            problems=self.problems,
        )

    # What must have been served.

    def _pieces(self, start: Start, end: int) -> Iterator[_Piece]:
        """Cut a stretch into pieces of one epoch and a bounded number of samples each."""
        batch = self.receipt.batch_size
        most = max(1, BLOCK_SAMPLES // batch)
        if start.stream:
            yield from self._stream_pieces(start, end, most)
            return
        samples = start.samples or 0
        per_epoch = steps_per_epoch(samples, batch)
        number = start.step
        while number < end:
            offset = start.step_of_epoch + number - start.step
            epoch, step = start.epoch + offset // per_epoch, offset % per_epoch
            steps = min(most, per_epoch - step, end - number)
            begins = np.arange(step, step + steps, dtype=np.int64) * batch
            yield _Piece(number, epoch, step, np.minimum(batch, samples - begins))
            number += steps

    def _stream_pieces(self, start: Start, end: int, most: int) -> Iterator[_Piece]:
        """Take epochs and the size of each epoch's last step from the ledger: only the stream knew where it ended."""
        # One step further than the stretch: whether its last step may be a short one depends on what follows.
        records = self.book.records[self.book.between(start.step, end + 1)]
        numbers, first = np.unique(records["number"], return_index=True)
        seen = dict(zip(numbers.tolist(), records[["epoch", "step"]][first].tolist(), strict=True))
        epoch, step = start.epoch, start.step_of_epoch
        piece: list[tuple[int, int, int]] = []
        for number in range(start.step, end):
            there = seen.get(number, (epoch, step))
            closes_epoch = there[0] == epoch + 1
            if closes_epoch and there[1]:
                self.problems.append(
                    f"step {number}: epoch {there[0]} begins at its step {there[1]}, so what came before is lost"
                )
            if piece and (closes_epoch or len(piece) == most):
                yield self._sized(piece, closes_epoch=closes_epoch)
                piece = []
            if closes_epoch:
                epoch, step = there
            piece.append((number, epoch, step))
            step += 1
        if piece:
            yield self._sized(piece, closes_epoch=seen.get(end, (-1, 0))[0] != epoch)

    def _sized(self, steps: Sequence[tuple[int, int, int]], *, closes_epoch: bool) -> _Piece:
        sizes = np.full(len(steps), self.receipt.batch_size, dtype=np.int64)
        last = steps[-1][0]
        served = self.book.records[self.book.between(last, last + 1)]
        if closes_epoch and len(served):
            _, once = np.unique(served["shard"], return_index=True)
            if len(once) == self.receipt.shards:
                sizes[-1] = min(self.receipt.batch_size, int(served["count"][once].sum()))
        return _Piece(*steps[0], sizes)

    def _expected(self, piece: _Piece, start: Start) -> tuple[_Whole, NDArray[np.uint64]]:
        """Give how many samples each (step, shard) must have held, and their digests."""
        batch, shards = self.receipt.batch_size, self.receipt.shards
        low = piece.step * batch
        high = low + (len(piece.sizes) - 1) * batch + int(piece.sizes[-1])
        order = Order(high if start.stream else start.samples or 0, start.order_seed, start.shuffle)
        ids = memoryview(order.indices(piece.epoch, low, high).tobytes())
        begins = np.arange(len(piece.sizes), dtype=np.int64)[:, None] * batch
        cuts = begins + np.arange(shards + 1, dtype=np.int64) * piece.sizes[:, None] // shards
        places = (cuts * 8).tolist()
        digests = b"".join(
            ledger.digest(ids[row[shard] : row[shard + 1]]) for row in places for shard in range(shards)
        )
        return np.diff(cuts, axis=1).ravel(), np.frombuffer(digests, dtype="<u8").reshape(-1, 2)

    # What was served.

    def _check(self, piece: _Piece, start: Start) -> None:
        shards = self.receipt.shards
        counts, digests = self._expected(piece, start)
        place = self.book.between(piece.number, piece.number + len(piece.sizes))
        records, sources = self.book.records[place], self.book.sources[place]
        steps = records["number"].astype(np.int64) - piece.number
        cells = steps * shards + records["shard"]
        right = (
            (records["digest"] == digests[cells]).all(axis=1)
            & (records["count"] == counts[cells])
            & (records["epoch"] == piece.epoch)
            & (records["step"].astype(np.int64) == piece.step + steps)
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
            self.problems.append(f"step {piece.number + step}, shard {shard}: {fault}")

    def _missing(self, cell: int, counts: _Whole, start: Start) -> str:
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

    def _twice(self, cell: int, cells: _Whole, sources: _Whole) -> str:
        low, high = np.searchsorted(cells, [cell, cell + 1]).tolist()
        by = " and ".join(str(self.book.origins[source]) for source in sources[low:high].tolist())
        return f"served {high - low} times, by {by}"

    def _fault(self, record: np.void, source: np.int64, wanted: np.int64) -> str:
        origin = self.book.origins[source]
        if int(record["count"]) != wanted:
            return f"{origin} served {record['count']} samples where the order gives {wanted}"
        return f"{origin} served other samples than the order gives"

    def _check_chain(self) -> None:
        link, number = FIRST_LINK, 0
        for step, point in sorted(self.receipt.checkpoints.items()):
            records = self.book.records[self.book.between(number, step)]
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

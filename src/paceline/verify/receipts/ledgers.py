"""The records of all ledgers of a run, as an audit compares them with the order of its data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError
from paceline.records import ledger
from paceline.records.receipt import Receipt

GAP_STEPS = 1000
"""More steps than these that are on no ledger are told of in one line: nobody walks through a billion of them."""

Whole: TypeAlias = NDArray[np.int64]


@dataclass
class Ledgers:
    """The records of all ledgers that led to the last checkpoint, in order of (step, shard)."""

    records: ledger.Records
    sources: Whole
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
    def read(cls, folder: Path, receipt: Receipt) -> Ledgers:
        """Read every ledger; what belongs to no kept step is only counted."""
        found = {origin: ledger.read(path) for origin, path in ledger.paths(folder).items()}
        if not found:
            raise InputError(f"there is no ledger in {folder / ledger.FOLDER}, so nothing can be audited.")
        records = np.concatenate(list(found.values()))
        sources = np.repeat(np.arange(len(found), dtype=np.int64), [len(one) for one in found.values()])
        generations = {start.generation: start.step for start in receipt.history}
        strange = {origin: _strange(one, generations) for origin, one in found.items()}
        segments = receipt.segments
        led = ledger.belonging(
            records, [start.step for start in segments], [start.generation for start in segments]
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
                    f"the ledger of {origin} goes on for {more} records after one that was never finished"
                    for origin, path in ledger.paths(folder).items()
                    if (more := ledger.behind_the_end(path, receipt.shards)) > receipt.shards
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
        """Return the place of the records of the steps [first, last)."""
        low, high = np.searchsorted(self.records["number"], np.array([first, last], dtype=np.uint64))
        return slice(int(low), int(high))

    def served(self, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
        """Cut the steps [first, last) into those that ledgers speak of and the long gaps between: (begin, end, whether)."""
        numbers = np.unique(self.records["number"][self.between(first, last)]).tolist()
        begin = at = first
        for number in (*numbers, last):
            if number - at > GAP_STEPS:
                if at > begin:
                    yield begin, at, True
                yield at, number, False
                begin = number
            at = number + 1
        if last > begin:
            yield begin, last, True


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

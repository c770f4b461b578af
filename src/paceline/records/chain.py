"""Follows the hash chain over all ledgers of a run, from one checkpoint to the next. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.records import ledger
from paceline.records.receipt import Receipt


class Chain:
    """How far the chain has been followed, and what the ledgers held beyond that."""

    def __init__(self, folder: Path, receipt: Receipt) -> None:
        """Continue where the receipt's last link is."""
        self._folder = folder
        self.step, link = receipt.linked
        """Up to where it has been followed."""
        self._link: bytes | None = link
        self._read: dict[Path, int] = {}
        """How many records of each ledger have been read."""
        self._ahead = np.empty(0, dtype=ledger.RECORD)
        """Those of later steps: others may be there already while a checkpoint is written."""

    def pass_by(self) -> None:
        """Skip the records that the ledgers hold now: the last link covers them, or they were discarded."""
        self._read = {path: ledger.capacity(path) for path in ledger.paths(self._folder).values()}

    def follow(self, receipt: Receipt, step: int) -> bytes | None:
        """Return the link at a step whose records all are there; None if one is missing, and for good."""
        if step <= self.step or self._link is None:
            return self._link
        records = np.concatenate([self._ahead, *self._gained()])
        segments = receipt.segments
        led = ledger.belonging(
            records, [start.step for start in segments], [start.generation for start in segments]
        )
        self._link = ledger.chain(self._link, records[led], receipt.shards, range(self.step, step))
        self.step = step
        self._ahead = records[records["number"] >= step]
        return self._link

    def _gained(self) -> list[ledger.Records]:
        gained = []
        for path in ledger.paths(self._folder).values():
            before = self._read.get(path, 0)
            records = ledger.read(path, before)
            self._read[path] = before + len(records)
            gained.append(records[records["number"] >= self.step])
        return gained

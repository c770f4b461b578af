"""Verifies a task: one process beside every candidate, at several numbers of shards, and the diagnosis where they differ."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline import strategies
from paceline.errors import InputError, WorkerFailedError
from paceline.launch import api
from paceline.verify.proof.bounds import bound
from paceline.verify.proof.comparing import Comparison
from paceline.verify.proof.differences import Difference, first_difference
from paceline.verify.proof.evidence import ProofEvidence
from paceline.verify.proof.fresh import FreshRun
from paceline.verify.proof.lab.notes import Notes
from paceline.verify.proof.probes import diagnose
from paceline.verify.proof.record import Record
from paceline.verify.proof.request import Candidate, VerifyRequest
from paceline.verify.proof.task_report import Row, TaskReport
from paceline.verify.report import Finding
from paceline.world import env

_LAB = "paceline.verify.proof.lab.work:main"


def verify(request: VerifyRequest, progress: Callable[[str], None] = lambda _: None) -> TaskReport:
    """Run the reference and each candidate, compare them at every step, and explain what differs."""
    if env.identity() is not None:
        raise InputError(
            "verify starts its own workers, but this process is one of another launcher's. Run it by itself."
        )
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        check = _Check(request, Path(folder), progress)
        try:
            return check.report()
        finally:
            if check.fresh is not None:
                check.fresh.close()


class _Check:
    """One verification in progress."""

    def __init__(self, request: VerifyRequest, folder: Path, progress: Callable[[str], None]) -> None:
        self.started = time.perf_counter()
        request.candidates()  # refuses what cannot be run before anything is started
        of_task = api.task_shards(request.spec) if request.shards is None else None
        self.comparisons = [
            Comparison(replace(request, shards=shards), folder / str(shards), progress)
            for shards in request.shard_counts(of_task)
        ]
        self.first = self.comparisons[0]
        self.fresh = FreshRun(self.first.request, folder) if request.hash_seed else None

    def report(self) -> TaskReport:
        """Compare, diagnose and return the report."""
        unfit = self._leave_out()
        rows = {one.request.total_shards: one.rows() for one in self.comparisons}
        wrong = next((one for one in self.comparisons if one.broken or one.failed), None)
        resumes, unresumed = self.comparisons[-1].resumes()
        findings, cleared, unchecked = self._diagnose(wrong or self.first)
        if wrong is not None and all(finding.harmless for finding in findings):
            shards = wrong.request.total_shards
            rows[shards] = [row if row.holds else wrong.bisected(row) for row in rows[shards]]
        last = self.first.reference.steps[-1]
        return TaskReport(
            task=self.first.request.spec.name,
            steps=len(self.first.reference.steps),
            shard_counts=tuple(rows),
            loss=last.loss,
            bound=bound(last.number, self._lowest(rows)),
            rows=[row for held in rows.values() for row in held],
            resumes=resumes,
            findings=findings,
            ruled_out=cleared if wrong is not None else [],
            unchecked=[*unfit, *unchecked, *self.first.reference.unchecked, *unresumed],
            seconds=time.perf_counter() - self.started,
        )

    def _leave_out(self) -> list[str]:
        """Leave out numbers of shards that nobody asked for and one process cannot take; return why."""
        unfit = []
        for one in self.comparisons[1:]:
            try:
                _ = one.reference
            except (InputError, WorkerFailedError) as error:
                reason = (
                    (error.trace.strip() or str(error)).splitlines()[-1]
                    if isinstance(error, WorkerFailedError)
                    else error
                )
                unfit.append(f"{one.request.total_shards} shards: one process cannot take them ({reason})")
                self.comparisons.remove(one)
        return unfit

    def _lowest(self, rows: dict[int, list[Row]]) -> str:
        """Return the lowest precision that a numeric candidate is held to."""
        precision = self.first.reference.precision
        numeric = [
            self.first.request.arithmetic(Candidate(row.strategy, row.workers), precision)
            for held in rows.values()
            for row in held
            if row.promised == "numeric"
        ]
        return next((one for one in numeric if one != "fp32"), precision)

    # The diagnosis.

    def _diagnose(self, comparison: Comparison) -> tuple[list[Finding], list[str], list[str]]:
        wrong = bool(comparison.broken or comparison.failed)
        step = min((one.step for one in comparison.differences.values()), default=0)
        workers = max(
            (one.workers for one in comparison.able if strategies.entry(one.strategy).processes is None),
            default=1,
        )
        workers = min(workers, comparison.request.total_shards)
        if wrong:
            workers = max(workers, min(2, comparison.request.total_shards))
        args = (step, comparison.request.epochs)
        outcome = comparison.launch(_LAB, Candidate("ddp", workers), *args)
        record, trouble = self.fresh.answer if self.fresh is not None else (None, "left out")
        unchecked = [] if record else [f"another hash seed ({trouble})"]
        hashed = _hash_difference(self.first.reference, record) if record else None
        if outcome.failure is not None:
            return [], [], [*unchecked, f"every probe: a step taken alone failed ({outcome.failure.message})"]
        notes: list[Notes] = list(outcome.value())
        again = None
        if wrong or hashed is not None or not _alike(notes):
            # The same step in a group of one, where there is something to explain.
            alone = comparison.launch(_LAB, Candidate("ddp", 1), *args)
            again = None if alone.failure is not None else alone.value()[0]
        evidence = ProofEvidence(
            reference=comparison.reference,
            broken=comparison.broken,
            failed=comparison.failed,
            notes=notes,
            again=again,
            hashed=hashed,
        )
        findings, cleared = diagnose(evidence)
        return findings, cleared, [*unchecked, *notes[0].unchecked]


def _alike(notes: Sequence[Any]) -> bool:
    return all(replace(one, rank=0) == replace(notes[0], rank=0) for one in notes)


def _hash_difference(reference: Record, record: Record) -> Difference | None:
    few = replace(reference, steps=reference.steps[: len(record.steps)], metrics={})
    return first_difference(few, [record])

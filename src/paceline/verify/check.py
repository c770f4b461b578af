"""Verifies a task: the reference, every candidate beside it, and the diagnosis when they part."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline import strategies
from paceline.errors import InputError
from paceline.launch import api
from paceline.launch.base import Outcome
from paceline.verify.bounds import Size, bound
from paceline.verify.comparison import Difference, count_samples, first_difference
from paceline.verify.evidence import Evidence
from paceline.verify.fresh import FreshRun
from paceline.verify.lab.notes import Notes
from paceline.verify.probes import diagnose
from paceline.verify.record import Dump, Record
from paceline.verify.report import Report, Row
from paceline.verify.request import REFERENCE, Candidate, Request
from paceline.world import env

_RECORD = "paceline.verify.recording:main"
_LAB = "paceline.verify.lab.work:main"


def verify(request: Request) -> Report:
    """Run the reference and each candidate, compare them at every step, and explain what differs."""
    if env.identity() is not None:
        raise InputError(
            "verify starts its own workers, but this process is one of another launcher's. Run it by itself."
        )
    if request.shards is None:
        request = replace(request, shards=api.task_shards(request.spec))
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        check = _Check(request, Path(folder))
        try:
            return check.report()
        finally:
            if check.fresh is not None:
                check.fresh.close()


@dataclass
class _Check:
    """One verification under way."""

    request: Request
    folder: Path
    broken: dict[str, list[Record]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    """Where candidates first part from the reference."""

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        self.able, self.unable = self.request.candidates()
        self.fresh = FreshRun(self.request, self.folder) if self.request.hash_seed else None

    def report(self) -> Report:
        """Do everything, and say what came of it."""
        request, spec = self.request, self.request.spec
        self.reference: Record = self._launch(_RECORD, REFERENCE, order=True).value()[0]
        rows = [self._row(candidate) for candidate in self.able]
        rows += [
            Row(strategy=one.strategy, workers=one.workers, promised="", found="skipped", first=reason)
            for one, reason in self.unable
        ]
        findings, cleared, unchecked = self._diagnose()
        last = self.reference.steps[-1]
        return Report(
            task=spec.name,
            steps=len(self.reference.steps),
            shards=request.total_shards,
            loss=last.loss,
            bound=bound(last.number, self.reference.precision),
            rows=rows,
            findings=findings,
            ruled_out=cleared if self.broken or self.failed else [],
            unchecked=unchecked,
            seconds=time.perf_counter() - self.started,
        )

    def _launch(self, function: str, candidate: Candidate, *args: Any, **kwargs: Any) -> Outcome:
        return api.start(
            function,
            (self.request.spec, *args),
            kwargs,
            self.request.options(candidate),
            threads=self.request.worker_threads,
        )

    # The comparison.

    def _row(self, candidate: Candidate) -> Row:
        outcome = self._launch(_RECORD, candidate)
        if outcome.interrupted is not None:
            raise KeyboardInterrupt
        facts: dict[str, Any] = {"strategy": candidate.strategy, "workers": candidate.workers}
        if outcome.failure is not None:
            self.failed[str(candidate)] = outcome.failure.message
            level = strategies.load(candidate.strategy).level(self.request.options(candidate).tuning)
            promised = self.request.exact or str(level)
            return Row(**facts, promised=promised, found="failed", first=outcome.failure.message)
        ranks: list[Record] = list(outcome.results)
        lost, repeated = count_samples(self.reference, ranks)
        facts |= {
            "promised": ranks[0].exactness,
            "lost": lost,
            "repeated": repeated,
            "seconds": round(max(rank.seconds for rank in ranks), 3),
        }
        difference = first_difference(self.reference, ranks)
        if difference is None:
            return Row(**facts, found="bitwise")
        row = self._measured(candidate, difference, facts)
        if not row.holds:
            self.broken[str(candidate)] = ranks
            self.steps.append(difference.step)
        return row

    def _measured(self, candidate: Candidate, difference: Difference, facts: dict[str, Any]) -> Row:
        """Run both once more, this time writing down the tensors of the step where they part and of the last one."""
        from paceline.verify import sizes

        steps = tuple(sorted({difference.step, self.reference.steps[-1].number}))
        folders = {one: self.folder / f"{one.strategy}-{one.workers}" for one in (REFERENCE, candidate)}
        for one, folder in folders.items():
            folder.mkdir(exist_ok=True)
            self._launch(_RECORD, one, dump=Dump(folder=folder, steps=steps)).value()
        pairs = [
            (
                step,
                Dump(folder=folders[REFERENCE], steps=steps).path(0, step),
                Dump(folder=folders[candidate], steps=steps).path(difference.rank, step),
            )
            for step in steps
        ]
        found = [
            size
            for step, mine, theirs in pairs
            if theirs.exists()
            for size in sizes.measure(step, mine, theirs)
        ]
        first = pairs[steps.index(difference.step)]
        by_how_much = (
            sizes.of_tensor(difference.step, difference.kind, difference.name, first[1], first[2])
            if first[2].exists()
            else None
        )
        return _judged(difference, found, by_how_much, self.reference.precision, facts)

    # The diagnosis.

    def _diagnose(self) -> tuple[list[Any], list[str], list[str]]:
        step = min(self.steps, default=0)
        workers = max(
            (one.workers for one in self.able if strategies.entry(one.strategy).processes is None), default=1
        )
        if self.broken or self.failed:
            workers = max(workers, min(2, self.request.total_shards))
        outcome = self._launch(_LAB, Candidate("ddp", workers), step)
        record, trouble = self.fresh.answer if self.fresh is not None else (None, "left out")
        unchecked = [] if record else [f"another hash seed ({trouble})"]
        hashed = _hash_difference(self.reference, record) if record else None
        if outcome.failure is not None:
            return [], [], [*unchecked, f"every probe: a step taken alone failed ({outcome.failure.message})"]
        notes: list[Notes] = list(outcome.value())
        again = self._again(step, notes, hashed)
        evidence = Evidence(
            reference=self.reference,
            broken=self.broken,
            failed=self.failed,
            notes=notes,
            again=again,
            hashed=hashed,
        )
        findings, cleared = diagnose(evidence)
        return findings, cleared, [*unchecked, *notes[0].unchecked]

    def _again(self, step: int, notes: Sequence[Notes], hashed: Difference | None) -> Notes | None:
        """Take the same step in a group of one, where there is something to explain."""
        alike = all(replace(one, rank=0) == replace(notes[0], rank=0) for one in notes)
        if alike and not self.broken and not self.failed and hashed is None:
            return None
        outcome = self._launch(_LAB, Candidate("ddp", 1), step)
        return None if outcome.failure is not None else outcome.value()[0]


def _hash_difference(reference: Record, record: Record) -> Difference | None:
    return first_difference(replace(reference, steps=reference.steps[: len(record.steps)]), [record])


def _judged(
    difference: Difference,
    found: Sequence[Size],
    by_how_much: Size | None,
    precision: str,
    facts: dict[str, Any],
) -> Row:
    """Say which level a difference of these sizes is."""
    # Later gradients and the optimizer's moments belong to weights that differ already, and say nothing of their own.
    counted = [
        size
        for size in found
        if size.kind in ("weight", "loss", "buffer")
        or (size.kind == "gradient" and size.step == difference.step)
    ]
    if difference.kind == "optimizer state" and by_how_much is not None:
        counted.append(by_how_much)
    inputs_differ = difference.kind in ("samples", "data", "learning rate")
    within = all(size.relative <= bound(size.step, precision) for size in counted)
    amount = f", by {by_how_much.relative:.2g} relative ({by_how_much.absolute:.2g})" if by_how_much else ""
    return Row(
        **facts,
        found="numeric" if within and not inputs_differ else "diverged",
        # Other bits of no size are zeros of another sign, or a gradient of zeros where one process has none.
        relative=max((size.relative for size in counted), default=None if inputs_differ else 0.0),
        first=f"{difference}{amount}",
        step=difference.step,
    )

"""Holds every candidate to one process at one number of shards: step by step, by a loss curve, and across a resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline import strategies
from paceline.launch import api
from paceline.launch.base import Outcome
from paceline.verify.proof import statistics
from paceline.verify.proof.bisecting import first_operation
from paceline.verify.proof.bounds import Size, bound
from paceline.verify.proof.differences import Difference, count_samples, first_difference, resumed
from paceline.verify.proof.record import Dump, Record, Watching
from paceline.verify.proof.request import REFERENCE, Candidate, VerifyRequest
from paceline.verify.proof.task_report import Resume, Row

RECORD = "paceline.verify.proof.recording:main"
_NOT_COMPUTED = ("samples", "data", "learning rate", "starting weight")
"""Differences that no operation of a step makes."""


@dataclass
class Comparison:
    """Everything compared at one number of shards."""

    request: VerifyRequest
    folder: Path
    progress: Callable[[str], None]
    broken: dict[str, list[Record]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    differences: dict[Candidate, Difference] = field(default_factory=dict)
    """Where candidates that do not hold first differ from the reference."""
    promised: dict[Candidate, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.able, self.unable = self.request.candidates()

    @cached_property
    def reference(self) -> Record:
        """The record of one process."""
        outcome = self.launch(RECORD, REFERENCE, Watching(order=True, evaluate=True))
        record: Record = outcome.value()[0]
        return record

    def launch(
        self, function: str, candidate: Candidate, *args: Any, seed: int | None = None, **changes: Any
    ) -> Outcome:
        """Run a function of (run, spec, *args) as a candidate, or a changed one, would be run."""
        self.progress(f"{candidate}, {self.request.total_shards} shards")
        spec = self.request.spec
        if seed is not None:
            spec = replace(spec, overrides={**spec.overrides, "seed": seed})
        args = tuple(
            replace(one, epochs=self.request.epochs) if isinstance(one, Watching) else one for one in args
        )
        outcome = api.start(
            function,
            (spec, *args),
            {},
            replace(self.request.options(candidate), **changes),
            threads=self.request.worker_threads,
        )
        if outcome.interrupted is not None:
            raise KeyboardInterrupt
        return outcome

    def rows(self) -> list[Row]:
        """Compare every candidate that can be run."""
        _ = self.reference
        rows = [self._row(candidate) for candidate in self.able]
        return rows + [
            Row(
                strategy=one.strategy,
                workers=one.workers,
                shards=self.request.total_shards,
                promised="",
                found="skipped",
                first=reason,
            )
            for one, reason in self.unable
        ]

    def _row(self, candidate: Candidate) -> Row:
        outcome = self.launch(RECORD, candidate, Watching(evaluate=True))
        facts: dict[str, Any] = {
            "strategy": candidate.strategy,
            "workers": candidate.workers,
            "shards": self.request.total_shards,
        }
        if outcome.failure is not None:
            self.failed[str(candidate)] = outcome.failure.message
            level = strategies.load(candidate.strategy).level(self.request.options(candidate).tuning)
            promised = self.request.more.get("exact") or str(level)
            found = "refused" if outcome.failure.kind == "input" else "failed"
            return Row(**facts, promised=promised, found=found, first=outcome.failure.message)
        ranks: list[Record] = list(outcome.results)
        lost, repeated = count_samples(self.reference, ranks)
        facts |= {
            "promised": ranks[0].exactness,
            "lost": lost,
            "repeated": repeated,
            "seconds": round(max(rank.seconds for rank in ranks), 3),
        }
        self.promised[candidate] = ranks[0].exactness
        difference = first_difference(self.reference, ranks)
        if difference is None:
            return Row(**facts, found="bitwise")
        row = self._measured(candidate, difference, facts, ranks)
        if not row.holds:
            self.broken[str(candidate)] = ranks
            self.differences[candidate] = difference
        return row

    def _measured(
        self, candidate: Candidate, difference: Difference, facts: dict[str, Any], ranks: Sequence[Record]
    ) -> Row:
        """Run both once more, this time writing down the tensors of the step where they differ and of the last one."""
        from paceline.verify.proof import sizes

        last = self.reference.steps[-1].number
        steps = tuple(sorted({difference.step, last}))
        mine, theirs = self._dumped(REFERENCE, steps, 0), self._dumped(candidate, steps, difference.rank)
        pairs = {step: (mine[step], theirs[step]) for step in steps if step in mine and step in theirs}
        found = [size for step, pair in pairs.items() for size in sizes.measure(step, *pair)]
        by_how_much = None
        if difference.kind == "metric":
            by_how_much = self._metric(ranks, difference)
        elif difference.step in pairs:
            by_how_much = sizes.of_tensor(
                difference.step, difference.kind, difference.name, *pairs[difference.step]
            )
        precision = self.request.arithmetic(candidate, self.reference.precision)
        row = judged(difference, found, by_how_much, precision, facts)
        if row.promised == "statistical" and row.found == "diverged":
            return self._by_curve(row, ranks, pairs.get(last), difference)
        return row

    def _dumped(self, one: Candidate, steps: tuple[int, ...], rank: int) -> dict[int, Path]:
        """Run once more and write down the tensors of some steps; gives the files that are there."""
        folder = self.folder / f"{one.strategy}-{one.workers}"
        folder.mkdir(exist_ok=True)
        dump = Dump(folder=folder, steps=steps)
        self.launch(RECORD, one, Watching(dump=dump)).value()
        paths = {step: dump.path(rank, step) for step in steps}
        return {step: path for step, path in paths.items() if path.exists()}

    def _metric(self, ranks: Sequence[Record], difference: Difference) -> Size | None:
        from paceline.verify.proof import sizes

        other = next(one for one in ranks if one.rank == difference.rank)
        found = [
            sizes.of_number(difference.step, "metric", name, value, other.metrics.get(name, float("nan")))
            for name, value in self.reference.metrics.items()
        ]
        return max((one for one in found if one is not None), key=lambda size: size.relative, default=None)

    # What only a loss curve can say.

    @cached_property
    def _other_seeds(self) -> list[list[float]]:
        """Loss curves of one process with other seeds."""
        seed = self.request.options(REFERENCE).seed
        records = [
            self.launch(RECORD, REFERENCE, Watching(), seed=seed + 1 + number).value()[0]
            for number in range(statistics.SEEDS)
        ]
        return [[step.loss for step in record.steps] for record in records]

    def _by_curve(
        self,
        row: Row,
        ranks: Sequence[Record],
        last: tuple[Path, Path] | None,
        difference: Difference,
    ) -> Row:
        """Hold a statistical promise to the band that other seeds span."""
        from paceline.verify.proof import sizes

        if len(self.reference.steps) < statistics.FEWEST_STEPS:
            words = f"a loss curve takes --steps {statistics.FEWEST_STEPS} or more"
            return replace(row, found="unverified", first=words, relative=None)
        if difference.kind in ("samples", "data", "starting weight"):
            return row  # the loss of other data is no curve to compare
        curve = [step.loss for step in self.reference.steps]
        band = statistics.band(curve, self._other_seeds)
        there = statistics.second_half([step.loss for step in ranks[0].steps])
        moved = float("inf") if last is None else sizes.moved(*last)
        inside = band.holds(there) and moved <= statistics.FARTHEST
        told = (
            f"by its loss curve: mean loss of the second half {there:.4g}, of one process "
            f"{statistics.second_half(curve):.4g}, band {band}; weights moved {moved:.2g} times as far "
            f"(at most {statistics.FARTHEST:g})"
        )
        return replace(row, found="statistical" if inside else "diverged", band=told)

    # Saved in the middle, resumed otherwise.

    def resumes(self) -> tuple[list[Resume], list[str]]:
        """Save with one candidate of each strategy, resume with the next; gives what was not tried as well."""
        steps = len(self.reference.steps)
        held = [one for one in self.able if one in self.promised and one not in self.differences]
        fit = [one for one in held if self.promised[one] != "statistical"]
        unchecked = [f"resuming {one}: a statistical promise" for one in held if one not in fit]
        if not self.request.resume or steps < 2:
            return [], []
        chosen = list({one.strategy: one for one in fit}.values())
        spare = [one for one in (*reversed(fit), REFERENCE) if one not in chosen] or [REFERENCE]
        nexts = [*chosen[1:], chosen[0] if len(chosen) > 1 else spare[0]] if chosen else []
        return [
            self._resume(one, other, steps // 2) for one, other in zip(chosen, nexts, strict=True)
        ], unchecked

    def _resume(self, first: Candidate, second: Candidate, at: int) -> Resume:
        folder = self.folder / f"saved-{first.strategy}-{first.workers}"
        last = self.reference.steps[-1].number
        dump = Dump(folder=self.folder / f"resumed-{first.strategy}-{first.workers}", steps=(last,))
        dump.folder.mkdir()
        levels = {self.promised.get(first, "bitwise"), self.promised.get(second, "bitwise")}
        facts: dict[str, Any] = {
            "saved_by": str(first),
            "resumed_by": str(second),
            "shards": self.request.total_shards,
            "step": at,
            "promised": "numeric" if "numeric" in levels else "bitwise",
        }
        saved = self.launch(RECORD, first, Watching(until=at), out=folder)
        if saved.failure is not None:
            return Resume(**facts, found="failed", first=saved.failure.message)
        outcome = self.launch(RECORD, second, Watching(evaluate=True, dump=dump), out=folder, resume=True)
        if outcome.failure is not None:
            return Resume(**facts, found="failed", first=outcome.failure.message)
        difference = first_difference(resumed(self.reference, at), list(outcome.results))
        if difference is None:
            return Resume(**facts, found="bitwise")
        told = f"it first differs at {difference}"
        if facts["promised"] == "numeric" and difference.kind not in ("samples", "data", "learning rate"):
            return Resume(**facts, found=self._size_of_resume(dump, last, second), first=told)
        return Resume(**facts, found="diverged", first=told)

    def _size_of_resume(self, dump: Dump, last: int, candidate: Candidate) -> str:
        from paceline.verify.proof import sizes

        mine = self._dumped(REFERENCE, (last,), 0)[last]
        found = sizes.measure(last, mine, dump.path(0, last))
        limit = bound(last, self.request.arithmetic(candidate, self.reference.precision))
        within = all(size.relative <= limit for size in found if size.kind in ("weight", "loss", "buffer"))
        return "numeric" if within else "diverged"

    # Where no cause is known.

    def bisected(self, row: Row) -> Row:
        """Run both once more, writing down every operation of the step where they differ, and name the first that differs."""
        candidate = Candidate(row.strategy, row.workers)
        difference = self.differences.get(candidate)
        computed = difference is not None and difference.kind not in (*_NOT_COMPUTED, "metric")
        if (
            difference is None
            or not computed
            or self.request.more.get("compile")
            or row.promised == "statistical"
        ):
            return row
        wanted = Watching(trace=difference.step)
        outcomes = [self.launch(RECORD, one, wanted) for one in (REFERENCE, candidate)]
        if any(outcome.failure is not None for outcome in outcomes):
            return row
        mine, theirs = (list(outcome.results) for outcome in outcomes)
        found = first_operation(mine[0].trace, [rank.trace for rank in theirs], difference)
        return replace(row, operation=found)


def judged(
    difference: Difference,
    found: Sequence[Size],
    by_how_much: Size | None,
    precision: str,
    facts: dict[str, Any],
) -> Row:
    """Return which level a difference of these sizes is."""
    # Later gradients and the optimizer's moments belong to weights that differ already, and say nothing of their own.
    counted = [
        size
        for size in found
        if size.kind in ("weight", "loss", "buffer")
        or (size.kind == "gradient" and size.step == difference.step)
    ]
    if difference.kind in ("optimizer state", "metric") and by_how_much is not None:
        counted.append(by_how_much)
    inputs_differ = difference.kind in ("samples", "data", "learning rate")
    within = all(size.relative <= bound(size.step, precision, size.kind) for size in counted)
    amount = f", by {by_how_much.relative:.2g} relative ({by_how_much.absolute:.2g})" if by_how_much else ""
    return Row(
        **facts,
        found="numeric" if within and not inputs_differ else "diverged",
        # Other bits of no size are zeros of another sign, or a gradient of zeros where one process has none.
        relative=max((size.relative for size in counted), default=None if inputs_differ else 0.0),
        first=f"{difference}{amount}",
        step=difference.step,
    )

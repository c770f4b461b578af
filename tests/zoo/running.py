"""Runs cells in real workers: many in one launch, and each that does not come out well once more, alone.

A launch takes half a second and more, a job a tenth of one, so the jobs of a layout share a launch. The first that
fails ends the launch: what came before it counts, what comes after it goes into the next launch, and it is
run alone, as a command of the user's would, which is where its verdict comes from.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.errors import InputError
from paceline.launch import api
from paceline.launch.base import Outcome
from paceline.launch.console import Console
from paceline.training.options import RunOptions
from tests.zoo.cells import TRAIN, Cell, Verdict
from tests.zoo.exhibits import Exhibit
from tests.zoo.judging import Result, judge, judge_plain
from tests.zoo.layouts import PLAIN, Layout, reference
from tests.zoo.working import HALFWAY, Job, work

HANG_S = 60.0
Told = Callable[[Cell, Verdict], None]


@dataclass(frozen=True)
class Failed:
    """A job that came to nothing, and what a user would have seen of it."""

    verdict: Verdict


Ended = list[Result] | Failed
"""What each rank has to say, or why there is nothing."""


class Zoo:
    """Runs cells and remembers what one process made of the same tasks."""

    def __init__(self, told: Told = lambda cell, verdict: None) -> None:
        self._told = told
        self._home = tempfile.TemporaryDirectory(prefix="paceline-zoo-")
        self._folder = Path(self._home.name)
        self._references: dict[tuple[str, int], Ended] = {}
        self.verdicts: dict[str, Verdict] = {}

    def __enter__(self) -> Zoo:
        return self

    def __exit__(self, *_: object) -> None:
        self._home.cleanup()

    def run(self, cells: Iterable[Cell]) -> dict[str, Verdict]:
        """Run cells, layout by layout, and return the verdict of each by its name."""
        by_layout: dict[Layout, list[Cell]] = {}
        for cell in cells:
            by_layout.setdefault(cell.layout, []).append(cell)
        for layout, some in sorted(by_layout.items(), key=lambda item: item[0].shards):
            if layout == PLAIN:
                self._plain(some)
            else:
                self._refer(layout.shards, [cell.exhibit for cell in some])
                self._layout(layout, some)
        return self.verdicts

    def _conclude(self, cell: Cell, verdict: Verdict) -> None:
        self.verdicts[cell.name] = verdict = _declared(cell, verdict)
        self._told(cell, verdict)

    def _plain(self, cells: list[Cell]) -> None:
        """Compare one process with a textbook loop."""
        jobs = {}
        for cell in cells:
            for plain in (False, True) if cell.refusal is None else (False,):
                key = f"{cell.exhibit.name}-{'book' if plain else 'one'}"
                jobs[key] = Job(key=key, task=cell.exhibit.reference, shards=1, plain=plain)
        ended = self._launch(PLAIN, jobs, alone=[f"{c.exhibit.name}-one" for c in cells if c.refusal])
        for cell in cells:
            one, book = (ended.get(f"{cell.exhibit.name}-{kind}") for kind in ("one", "book"))
            if isinstance(one, list) and isinstance(book, list):
                self._conclude(cell, judge_plain(book[0], one[0], _precision(cell.exhibit)))
            elif isinstance(one, list) and cell.refusal is not None:
                self._conclude(cell, Verdict("same"))
            else:
                self._conclude(cell, _failure(one, book))

    def _refer(self, shards: int, exhibits: Iterable[Exhibit]) -> None:
        """Let one process train what has not been trained with so many shards, to the end and halfway."""
        jobs, alone = {}, []
        for exhibit in dict.fromkeys(exhibits):
            if (exhibit.name, shards) in self._references or exhibit.refusal("single") is not None:
                continue
            jobs[exhibit.name] = Job(key=exhibit.name, task=exhibit.reference, shards=shards)
            if exhibit.resumes:
                key = f"{exhibit.name}-half"
                jobs[key] = replace(
                    jobs[exhibit.name], key=key, steps=HALFWAY, out=self._left(reference(shards), exhibit)
                )
        for key, ended in self._launch(reference(shards), jobs, alone=alone).items():
            self._references[key, shards] = ended

    def _left(self, layout: Layout, exhibit: Exhibit) -> Path:
        return self._folder / "runs" / f"{exhibit.name}-{layout.name}"

    def _layout(self, layout: Layout, cells: list[Cell]) -> None:
        jobs: dict[str, Job] = {}
        taken_up: dict[str, Job] = {}
        for cell in cells:
            name, task, shards = cell.exhibit.name, cell.exhibit.reference, layout.shards
            if cell.mode == TRAIN:
                jobs[name] = Job(key=name, task=task, shards=shards)
                continue
            left, half = self._left(layout, cell.exhibit), self._references.get((f"{name}-half", shards))
            jobs[f"{name}-half"] = Job(key=f"{name}-half", task=task, shards=shards, steps=HALFWAY, out=left)
            taken_up[name] = Job(key=f"{name}-back", task=task, shards=shards, out=left, resume=True)
            if isinstance(half, list):
                halfway = self._left(reference(shards), cell.exhibit)
                jobs[f"{name}-on"] = Job(key=f"{name}-on", task=task, shards=shards, out=halfway, resume=True)
        ended = self._launch(layout, jobs, alone=[c.exhibit.name for c in cells if c.refusal is not None])
        back = self._launch(
            reference(layout.shards),
            {job.key: job for name, job in taken_up.items() if isinstance(ended.get(f"{name}-half"), list)},
        )
        for cell in cells:
            name = cell.exhibit.name
            right = self._references.get((name, layout.shards))
            if cell.mode == TRAIN:
                self._conclude(cell, self._judged(right, ended[name], cell))
            else:
                self._conclude(cell, self._resumed(right, ended, back, cell))
        for cell in cells:
            shutil.rmtree(self._left(layout, cell.exhibit), ignore_errors=True)

    def _judged(self, right: Ended | None, ended: Ended, cell: Cell) -> Verdict:
        if isinstance(ended, Failed):
            return ended.verdict
        if not isinstance(right, list):
            return Verdict("WRONG", "it trains what one process does not")
        return judge(right[0], ended, cell.layout.level, precision=_precision(cell.exhibit))

    def _resumed(
        self, right: Ended | None, ended: dict[str, Ended], back: dict[str, Ended], cell: Cell
    ) -> Verdict:
        name = cell.exhibit.name
        half, on, then = ended.get(f"{name}-half"), ended.get(f"{name}-on"), back.get(f"{name}-back")
        for what, result in (("left halfway", half), ("taken up here", on), ("taken up by one", then)):
            if not isinstance(result, list):
                failed = _failure(result)
                return Verdict(failed.word, f"({what}) {failed.detail}")
        assert isinstance(on, list)
        assert isinstance(then, list)
        assert isinstance(right, list)
        there = judge(right[0], on, cell.layout.level, precision=_precision(cell.exhibit))
        if not there.good:
            return Verdict(there.word, f"(taken up here) {there.detail}")
        as_here = [{**result, "exactness": cell.layout.level} for result in then]
        here = judge(right[0], as_here, cell.layout.level, precision=_precision(cell.exhibit))
        return here if here.good else Verdict(here.word, f"(taken up by one process) {here.detail}")

    # Launches.

    def _launch(self, layout: Layout, jobs: dict[str, Job], alone: Sequence[str] = ()) -> dict[str, Ended]:
        """Do jobs in as few launches as it takes; those in `alone` in launches of their own."""
        ended: dict[str, Ended] = {}
        queue = [job for key, job in jobs.items() if key not in alone]
        while queue:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            outcome = self._start(layout, queue, folder, together=True)
            done = [
                job
                for job in queue
                if (results := self._results(job, layout, folder)) is not None
                and ended.setdefault(job.key, results)
            ]
            queue = queue[len(done) :]
            if queue and (outcome is None or outcome.failure is None):
                raise RuntimeError(f"{layout.name}: a launch ended well and left {queue[0].key} undone")
            if queue:
                ended[queue[0].key] = self._alone(layout, queue[0])
                queue = queue[1:]
        for key in alone:
            if key in jobs:
                ended[key] = self._alone(layout, jobs[key])
        return ended

    def _alone(self, layout: Layout, job: Job) -> Ended:
        """Do one job as a user's command would, and keep what the user would see of a failure."""
        if job.out is not None and not job.resume:
            shutil.rmtree(job.out, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            outcome = self._start(layout, [job], folder, together=False)
        except InputError as error:
            return Failed(_refusal(str(error)))
        results = self._results(job, layout, folder)
        if outcome.failure is None and results is not None:
            return results
        return Failed(_verdict(outcome))

    def _start(self, layout: Layout, jobs: list[Job], folder: Path, *, together: bool) -> Outcome:
        options = RunOptions(
            strategy=layout.asked,
            workers=layout.workers,
            shards=layout.shards,
            device="cpu",
            elastic=not together,
            hang_timeout=HANG_S,
            max_restarts=0,
            out=folder / "launch",
            **layout.options,
        )
        launcher = api.choose(_Silent())
        plan = api.plan(
            launcher, work, ([_fresh(job, folder) for job in jobs], folder), {}, options, threads=1
        )
        if not together:
            plan = replace(plan, policy=replace(plan.policy, trains=True))
        return launcher.launch(plan)

    def _results(self, job: Job, layout: Layout, folder: Path) -> list[Result] | None:
        files = sorted(folder.glob(f"{job.key}.*.done"))
        begun = list(folder.glob(f"{job.key}.*.begun"))
        if not files or len(files) < len(begun):
            return None
        return [torch.load(path, weights_only=False) for path in files]


def _fresh(job: Job, folder: Path) -> Job:
    """Return a job that goes on in a copy of the run it resumes: it may be tried again."""
    if not job.resume or job.out is None:
        return job
    copy = folder / "resumed" / job.key
    shutil.copytree(job.out, copy)
    return replace(job, out=copy)


class _Silent(Console):
    """Shows nothing."""

    def output(self, stream: str, chunk: bytes) -> None:
        pass


def _declared(cell: Cell, verdict: Verdict) -> Verdict:
    """Hold a verdict against what is declared of the cell."""
    said = cell.refusal
    if verdict.word == "refused" and said is None:
        return Verdict("UNDECLARED", f"refusal: {verdict.detail}")
    if verdict.word == "refused" and said is not None and said not in verdict.detail:
        return Verdict("UNDECLARED", f"refusal, {said!r} was expected: {verdict.detail}")
    if verdict.good and verdict.word != "refused" and said is not None:
        return Verdict("UNDECLARED", f"success: {said!r} was expected to refuse it, and it ends {verdict}")
    return verdict


def _verdict(outcome: Outcome) -> Verdict:
    failure = outcome.failure
    if failure is None:
        return Verdict("CRASH", "the launch ended well without a result")
    if failure.kind == "input":
        return _refusal(failure.message)
    if failure.kind == "hang":
        return Verdict("HANG", failure.message.splitlines()[0])
    return Verdict("CRASH", f"{failure.message.splitlines()[0]} (rank {failure.rank})")


def _refusal(message: str) -> Verdict:
    return Verdict("CRASH" if "\n" in message else "refused", message)


def _failure(*ended: Any) -> Verdict:
    return next(
        (one.verdict for one in ended if isinstance(one, Failed)), Verdict("CRASH", "there is no result")
    )


def _precision(exhibit: Exhibit) -> str:
    return str(getattr(exhibit.made, "precision", "fp32"))

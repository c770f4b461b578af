"""Disturbs a training on purpose and shows that nothing came of it. Imports no torch."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import strategies
from paceline.errors import InputError
from paceline.launch import api
from paceline.launch.base import Outcome
from paceline.launch.console import Console
from paceline.observe.events import Event, Note
from paceline.observe.progress import Progress
from paceline.option_fields import Options, ranged
from paceline.ranges import THREADS
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec
from paceline.verify.chaos.accomplice import Accomplice
from paceline.verify.chaos.faults import END, Marks
from paceline.verify.chaos.plan import FaultPlan, PlanRequest, make_plan
from paceline.verify.chaos.report import ChaosReport, Injection
from paceline.verify.chaos.timeline import Timeline, steps_redone
from paceline.verify.receipts.audit import audit
from paceline.world import env

UNDISTURBED, DISTURBED, MARKS = "undisturbed", "disturbed", "faults"
_WORKER = "paceline.verify.chaos.worker:main"
_RESTARTS_PER_FAULT = 4
OpenProgress = Callable[[], Progress | None]


@dataclass(frozen=True, kw_only=True)
class ChaosRequest(Options):
    """What `paceline chaos` was asked for."""

    spec: TrainSpec
    folder: Path
    """Both runs go into it, and the marks of the faults."""
    plan: PlanRequest
    strategy: str = RunOptions.strategy
    device: str = RunOptions.device
    threads: int | None = ranged(None, THREADS)
    assert_same: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if strategies.entry(self.strategy).processes is not None:
            raise InputError(
                f"chaos takes workers away, but --strategy {self.strategy} is one process. Use --strategy ddp."
            )
        if self.plan.workers < 2:
            raise InputError(
                f"--workers is {self.plan.workers}, but chaos needs at least 2: one that is lost, one that goes on."
            )
        if (self.folder / MARKS).exists():
            raise InputError(f"{self.folder} already holds a chaos run. Choose another --out.")
        if env.identity() is not None:
            raise InputError(
                "chaos starts its own workers, but this process is one of another launcher's. Run it by itself."
            )
        if END in self.plan.kinds and threading.current_thread() is not threading.main_thread():
            raise InputError(
                f"a fault of the kind {END} is a signal, which only the main thread gets. Call chaos from there."
            )
        self.options(UNDISTURBED, 1)

    def options(self, name: str, save_every: int) -> RunOptions:
        """Return the options of one of the two runs."""
        return RunOptions(
            strategy=self.strategy,
            workers=self.plan.workers,
            shards=self.plan.shards,
            seed=self.spec.overrides.get("seed", RunOptions.seed),
            device=self.device,
            out=self.folder / name,
            save_every=str(save_every),
            hang_timeout=self.plan.hang_timeout,
            max_restarts=_RESTARTS_PER_FAULT * self.plan.faults,
        )


def chaos(request: ChaosRequest, open_progress: OpenProgress = lambda: None) -> tuple[ChaosReport, Outcome]:
    """Train undisturbed, then among the faults that the seed gives, and compare."""
    return disturb(request, make_plan(replace(request.plan, sizes=_sizes(request))), open_progress)


def _sizes(request: ChaosRequest) -> tuple[int, ...]:
    """Return the numbers of workers that a join may ask for: all that the strategy can be laid out on, also when resumed.

    A pipeline that is resumed has as many stages as it has workers then, and the next join goes back to the first number.
    """
    options = request.options(UNDISTURBED, 1)
    choice, workers = options.choice, request.plan.workers
    recut = choice.split > 1 and "=" not in request.strategy
    return tuple(
        number
        for number in range(1, request.plan.shards + 1)
        if choice.fitted(number + choice.servers).trainers == number and not (recut and workers % number)
    )


def disturb(
    request: ChaosRequest, plan: FaultPlan, open_progress: OpenProgress = lambda: None
) -> tuple[ChaosReport, Outcome]:
    """Train undisturbed, then among the faults of a plan; return the report, and how the disturbed run ended."""
    started = time.perf_counter()
    spec = replace(request.spec, steps=plan.steps, epochs=None)
    marks = Marks(request.folder / MARKS)
    options = request.options(UNDISTURBED, plan.save_every)
    quiet = _start(api.TRAINER, (spec,), options, request, Console(open_progress()), "the undisturbed run")
    expected = quiet.value()[0]
    try:
        marks.folder.mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"the folder {request.folder} cannot be written: {error.strerror}. Choose another --out."
        ) from error
    console = FaultConsole(open_progress(), plan, marks)
    options = replace(options, out=request.folder / DISTURBED)
    outcome = _among_faults(request, plan, (spec, plan, str(marks.folder.resolve())), options, console)
    timeline = Timeline.read(request.folder / DISTURBED)
    report = ChaosReport(
        task=spec.name,
        strategy=request.strategy,
        workers=plan.workers,
        shards=options.total_shards,
        steps=plan.steps,
        seed=request.plan.seed,
        injections=_injections(timeline, plan, marks),
        undisturbed_sha256=expected["weights_sha256"],
        restarts=outcome.restarts,
        out=str(request.folder),
        assert_same=request.assert_same,
        seconds=time.perf_counter() - started,
        **_checked_records(request.folder / DISTURBED, timeline, outcome),
    )
    return report, outcome


def _among_faults(
    request: ChaosRequest, plan: FaultPlan, args: tuple[Any, ...], options: RunOptions, console: FaultConsole
) -> Outcome:
    """Run the disturbed training to its end: where a fault of the plan ends it before, it is resumed."""
    words, restarts = f"the same run, among {len(plan.faults)} faults", 0
    with Accomplice(plan, console.marks, request.folder / DISTURBED):
        while True:
            ends = console.ends()
            outcome = _start(_WORKER, args, options, request, console, words)
            restarts += outcome.restarts
            if outcome.interrupted is None:
                return replace(outcome, restarts=restarts)
            if outcome.interrupted != signal.SIGTERM or console.ends() == ends:
                raise KeyboardInterrupt  # it was the user's
            options = replace(options, resume=True)
            if "=" not in request.strategy:  # a mesh begins with all that its sides need
                options = replace(options, workers=plan.workers_at(outcome.saved_at or 0))
            words = f"the run, resumed from its checkpoint of step {outcome.saved_at}"


def _start(
    function: str,
    args: tuple[Any, ...],
    options: RunOptions,
    request: ChaosRequest,
    console: Console,
    words: str,
) -> Outcome:
    console.event(Note(text=words))
    record = {**args[0].record(), "threads": request.threads}
    return api.start(function, args, {}, options, threads=request.threads, console=console, record=record)


def _injections(timeline: Timeline, plan: FaultPlan, marks: Marks) -> tuple[Injection, ...]:
    made = marks.read()
    return tuple(
        Injection(
            fault=fault,
            mark=(mark := made.get(fault.number)),
            seconds=None if mark is None else timeline.recovery(fault, mark),
        )
        for fault in plan.faults
    )


def _checked_records(run: Path, timeline: Timeline, outcome: Outcome) -> dict[str, Any]:
    """Return what weights and ledgers of the disturbed run show; those of a failed run show nothing."""
    if outcome.failure is not None:
        return {"weights_sha256": None, "failure": outcome.failure.message}
    audited = audit(run)
    return {
        "weights_sha256": outcome.results[0]["weights_sha256"],
        "steps_redone": steps_redone(run),
        "samples": audited.samples,
        "lost": audited.lost,
        "repeated": audited.repeated,
        "problems": (*timeline.set_back, *audited.problems),
    }


class FaultConsole(Console):
    """Shows faults between the other events of a run: whatever a fault does, some event follows it."""

    def __init__(self, progress: Progress | None, plan: FaultPlan, marks: Marks) -> None:
        super().__init__(progress)
        self._plan, self.marks = plan, marks
        self._shown: set[int] = set()

    def ends(self) -> int:
        """Return how many faults have ended the launcher."""
        return sum(fault.kind == END and self.marks.has(fault.number) for fault in self._plan.faults)

    def event(self, event: Event) -> None:
        """Show what went off since the last event, then the event."""
        self._show_faults()
        super().event(event)

    def close(self) -> None:
        """Show what is left to be shown."""
        self._show_faults()
        super().close()

    def _show_faults(self) -> None:
        for number, mark in self.marks.read().items():
            if number not in self._shown:
                self._shown.add(number)
                fault = replace(self._plan.faults[number], step=mark.step)
                who = f"rank {mark.rank} (pid {mark.pid})"
                super().event(Note(text=f"fault {number + 1} of {len(self._plan.faults)}: {fault}, {who}"))

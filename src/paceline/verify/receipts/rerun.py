"""Re-runs a segment of a recorded run and says whether the bits agree with its receipt. Imports no torch."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import strategies
from paceline.errors import InputError
from paceline.launch import api
from paceline.option_fields import Options, ranged
from paceline.ranges import STEPS, THREADS, WORKERS, Range
from paceline.records.receipt import Point, Receipt, RunSegment, environment_differences
from paceline.strategies.tuning import Tuning
from paceline.training.folder import CHECKPOINTS
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec
from paceline.verify.receipts.kept_weights import check_kept
from paceline.verify.receipts.receipt_report import Compared, ReceiptReport
from paceline.world import env

_REPLAY = "paceline.verify.receipts.replay:main"
_GOVERNING = (
    *("task", "settings", "horizon", "max_grad_norm", "precision", "micro_batch", "compile"),
    *("sync_batchnorm", "exactness", "samples", "shuffle", "order_seed", "uneven"),
)
"""What must not change within a segment for one re-run to cover it."""
_OF_DATA = ("stream", "samples", "shuffle", "order_seed", "uneven")
"""What the re-run is not told, but finds out from the task."""


@dataclass(frozen=True, kw_only=True)
class SegmentReplay(Options):
    """Which segment of which run, and on what."""

    folder: Path
    steps: int | None = ranged(None, STEPS)
    """Compare the first so many steps."""
    start: int | None = ranged(None, Range(0, STEPS.high))
    """Or begin at the checkpoint of this step and go on to the next one."""
    strategy: str | None = None
    workers: int | None = ranged(None, WORKERS)
    """None takes as many as there are cores, up to one a shard."""
    threads: int | None = ranged(None, THREADS)
    """None takes what the run had: the bits depend on it."""
    device: str = RunOptions.device


@dataclass(frozen=True)
class _Segment:
    first: int
    points: dict[int, Point]
    facts: RunSegment

    @property
    def last(self) -> int:
        return max(self.points)


def verify_receipt(replay: SegmentReplay) -> ReceiptReport:
    """Take the steps of a segment again in a temporary folder and compare the hashes."""
    started = time.perf_counter()
    receipt = Receipt.read(replay.folder)
    segment = _segment(receipt, replay)
    _, faults = check_kept(replay.folder, receipt)
    options = _options(receipt, segment, replay)
    with tempfile.TemporaryDirectory(prefix="paceline-replay-") as place:
        out = Path(place) / "run"
        if segment.first:
            _begin_from(receipt, segment, replay.folder, out)
        outcome = api.start(
            _REPLAY,
            (_spec(receipt, segment), segment.facts.horizon, tuple(segment.points)),
            {},
            replace(options, out=out, resume=segment.first > 0),
            threads=replay.threads or segment.facts.threads,
        )
        found: str = outcome.value()[0]
        again = Receipt.read(out)
    faults += [
        f"the receipt says {name} {getattr(segment.facts, name)}, and the same task has {getattr(again.last, name)} here"
        for name in _OF_DATA
        if getattr(segment.facts, name) != getattr(again.last, name)
    ]
    if segment.first and found != receipt.checkpoints[segment.first].weights_sha256:
        raise InputError(
            f"the checkpoint of step {segment.first} in {replay.folder} is not the one that the receipt tells of: its weights "
            "have another hash. One of them was changed; begin at another checkpoint, or with --steps."
        )
    return ReceiptReport(
        name=receipt.name,
        folder=str(replay.folder),
        first=segment.first,
        strategy=options.strategy,
        workers=options.workers,
        recorded=segment.facts,
        compared=[
            Compared(step=step, there=there, here=again.checkpoints[step])
            for step, there in sorted(segment.points.items())
        ],
        differences=environment_differences(segment.facts, again.last),
        faults=faults,
        seconds=time.perf_counter() - started,
    )


def _segment(receipt: Receipt, replay: SegmentReplay) -> _Segment:
    """Choose the steps to take and the hashes to meet."""
    if replay.steps is not None and replay.start is not None:
        raise InputError("--steps and --from both choose a segment. Give one of them.")
    recorded = sorted(receipt.checkpoints)
    if not recorded:
        raise InputError(
            f"the receipt in {replay.folder} holds no hash yet: the run has saved no checkpoint."
        )
    first = replay.start or 0
    if replay.steps is None:
        chosen = [step for step in recorded if step > first][:1]
    else:
        chosen = [step for step in recorded if step <= replay.steps]
    if not chosen and replay.steps is not None:
        raise InputError(
            f"the receipt holds no hash within the first {replay.steps} steps. Use --steps {recorded[0]} or more."
        )
    if not chosen:
        raise InputError(
            f"step {first} is the last one that the receipt knows. Use --from with an earlier one."
        )
    _check_checkpoint(receipt, replay, first)
    return _Segment(
        first, {step: receipt.checkpoints[step] for step in chosen}, _facts(receipt, first, chosen[-1])
    )


def _check_checkpoint(receipt: Receipt, replay: SegmentReplay, first: int) -> None:
    folder = replay.folder / CHECKPOINTS
    there = [step for step in sorted(receipt.checkpoints) if (folder / f"step-{step}").is_dir()]
    if first and first not in there:
        kept = ", ".join(map(str, there)) or "none"
        raise InputError(f"there is no checkpoint of step {first} to begin from. There are: {kept}.")


def _facts(receipt: Receipt, first: int, last: int) -> RunSegment:
    """Return the start that governs the steps [first, last); refuse where another one set other terms on the way."""
    governing = [start for start in receipt.segments if start.step <= first]
    if not governing:
        begin = receipt.history[0].step
        raise InputError(f"the receipt begins at step {begin}. Use --from {begin}, or a later checkpoint.")
    facts = governing[-1]
    if facts.task is None:
        raise InputError(
            f"the run {receipt.name!r} was a loop of your own, or of a task sent as a value: a receipt cannot run that again. "
            "paceline audit works on it; paceline train leaves a receipt that can be run again."
        )
    for start in receipt.segments:
        changed = [name for name in _GOVERNING if getattr(start, name) != getattr(facts, name)]
        if first < start.step < last and changed:
            raise InputError(
                f"the run was resumed at step {start.step} with another {changed[0]} "
                f"({getattr(facts, changed[0])} before, {getattr(start, changed[0])} after), so no one re-run covers both. "
                f"Use --steps {start.step}, or --from {start.step}."
            )
    return facts


def _options(receipt: Receipt, segment: _Segment, replay: SegmentReplay) -> RunOptions:
    facts = segment.facts
    strategy = replay.strategy or facts.strategy
    known = strategies.entry(strategy)
    at_hand = 1 if known.processes == 1 and not known.threaded else min(env.cores(), receipt.shards)
    # What was computed on a CPU can be computed on one here; a GPU may be missing, and then the report says so.
    device = "cpu" if replay.device == RunOptions.device and facts.device == "cpu" else replay.device
    return RunOptions(
        strategy=strategy,
        workers=replay.workers or strategies.choice(strategy).workers or at_hand,
        shards=receipt.shards,
        exact=facts.exactness,
        compile=facts.compile,
        sync_batchnorm=facts.sync_batchnorm,
        transport=facts.transport_asked,
        tuning=Tuning(**facts.tuning) if replay.strategy is None else Tuning(),
        seed=receipt.seed,
        precision=facts.precision,
        device=device,
        keep=1,
    )


def _spec(receipt: Receipt, segment: _Segment) -> TrainSpec:
    facts = segment.facts
    overrides: dict[str, Any] = {
        "seed": receipt.seed,
        "precision": facts.precision,
        "micro_batch": facts.micro_batch,
        "num_workers": facts.num_workers,
        "find_unused_parameters": facts.find_unused_parameters,
    }
    return TrainSpec(
        task=facts.task or "",
        name=receipt.name,
        settings=facts.settings,
        steps=segment.last,
        batch_size=receipt.batch_size,
        max_grad_norm=facts.max_grad_norm,
        overrides=overrides,
    )


def _begin_from(receipt: Receipt, segment: _Segment, folder: Path, out: Path) -> None:
    """Make a run folder that ends where the segment begins, so that the re-run resumes there."""
    name = f"{CHECKPOINTS}/step-{segment.first}"
    shutil.copytree(folder / name, out / name)
    known = {segment.first: receipt.checkpoints[segment.first]}
    replace(receipt, history=(segment.facts,), checkpoints=known).write(out)

"""What a run says about itself: small frozen events that travel as one line of JSON each.

`time` is the wall clock of the moment an event was made. `step` counts finished steps, so the first is 1;
`epoch` counts from 0, as a run's position does, and is shown to people counted from 1. A number that is not
finite travels as the string "NaN", "Infinity" or "-Infinity", because JSON has no such numbers.
"""

from __future__ import annotations

import json
import math
import time as clock
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from paceline.errors import InputError


@dataclass(frozen=True, slots=True)
class Event:
    """The base: when it happened, and what kind of event it is."""

    kind: ClassVar[str] = "event"
    time: float = field(default_factory=clock.time, kw_only=True)


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """The workers are ready; `start_step` is the number of steps a resumed run has behind it."""

    kind: ClassVar[str] = "run_started"
    task: str
    strategy: str
    workers: int
    shards: int
    exactness: str
    device: str
    backend: str
    parameters: int
    samples: int | None
    batch_size: int
    total_steps: int | None
    epochs: int | None
    start_step: int
    out: str
    shards_from: str = "option"
    """Who said how many shards: option, task or workers."""
    transport: str = ""
    """What tensors travel by between workers: shared memory, gloo, nccl, calls, threads, none, or several."""


@dataclass(frozen=True, slots=True)
class StepFinished(Event):
    """One optimizer step is applied; `samples` and `seconds` are of this step alone."""

    kind: ClassVar[str] = "step"
    step: int
    epoch: int
    loss: float
    samples: int
    seconds: float
    learning_rate: float
    gradient_norm: float | None = None
    auxiliary: dict[str, float] = field(default_factory=dict)
    """The mean of each auxiliary term of the loss: its global total over its global weight."""


@dataclass(frozen=True, slots=True)
class Logged(Event):
    """What the loop has reported of a step with `run.log`."""

    kind: ClassVar[str] = "logged"
    step: int
    epoch: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class EpochFinished(Event):
    """Every sample was seen once more; `loss` is the mean over the epoch."""

    kind: ClassVar[str] = "epoch"
    epoch: int
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """The evaluation set was measured."""

    kind: ClassVar[str] = "evaluated"
    step: int
    epoch: int
    metrics: dict[str, float]
    samples: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk."""

    kind: ClassVar[str] = "checkpoint_saved"
    step: int
    path: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointDamaged(Event):
    """A checkpoint was found unusable and passed over."""

    kind: ClassVar[str] = "checkpoint_damaged"
    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note(Event):
    """A warning or a remark for the user."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True, slots=True)
class Profiled(Event):
    """Where the time of a step went, in seconds, on average over some steps of rank 0."""

    kind: ClassVar[str] = "profiled"
    steps: int
    host_s: dict[str, float]
    """By what it went into: data, forward, backward, reduction, optimizer, waiting, other."""
    device_s: dict[str, float]
    """The same of the GPU; empty where there is none."""
    path: str
    """The Chrome trace; empty where the run was too short for one."""


@dataclass(frozen=True, slots=True)
class Straggling(Event):
    """A worker has become slower than the others, or (`times` 1, waits for nothing) as fast as they again."""

    kind: ClassVar[str] = "straggling"
    rank: int
    host: str
    times: float
    """Its own time a shard, against the others'."""
    waits_for: str
    """data or compute: where the time goes."""


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A worker is gone; whether it is replaced, and how the others go on, follows."""

    kind: ClassVar[str] = "worker_lost"
    rank: int
    host: str
    reason: str
    step: int | None = None
    """The step in which its code failed, where that is known."""
    trace: str = ""
    """The traceback of its code, where that is why."""


@dataclass(frozen=True, slots=True)
class Regrouped(Event):
    """The workers have formed a new group, because one was lost, left or joined; training goes on at `step`."""

    kind: ClassVar[str] = "regrouped"
    generation: int
    workers: int
    step: int
    reason: str
    seconds: float
    source: str = ""
    """Where the parts of a state that is sharded came from: workers, copies, checkpoint, beginning."""
    redone: int = 0
    """Steps that had been taken and are taken again."""
    moved_bytes: int = 0
    """Bytes of a state that is sharded that went from one worker to another, all of them together."""
    transport: str = ""
    """What tensors travel by in the new group."""


@dataclass(frozen=True, slots=True)
class RunFinished(Event):
    """The run is done; `result` is what `train --json` prints."""

    kind: ClassVar[str] = "run_finished"
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunFailed(Event):
    """The run ended early, first on this rank."""

    kind: ClassVar[str] = "run_failed"
    rank: int
    host: str
    reason: str


_KINDS: dict[str, type[Event]] = {
    made.kind: made
    for made in (
        RunStarted,
        StepFinished,
        Logged,
        EpochFinished,
        Evaluated,
        CheckpointSaved,
        CheckpointDamaged,
        Note,
        Profiled,
        Straggling,
        WorkerLost,
        Regrouped,
        RunFinished,
        RunFailed,
    )
}
_NAMES = {made: tuple(each.name for each in fields(made)) for made in _KINDS.values()}
# Text stays text: a note that reads "NaN" must not come back as a number.
_MAY_HOLD_NUMBERS = {
    made: tuple(each.name for each in fields(made) if str(each.type).startswith(("float", "dict")))
    for made in _KINDS.values()
}
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# One encoder for all events: json.dumps would build a new one each time.
_encode: Callable[[Any], str] = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":")
).encode


def to_json(event: Event) -> str:
    """Write an event as one line of JSON, without the line end."""
    if type(event) is StepFinished and not event.auxiliary:
        norm = 0.0 if event.gradient_norm is None else event.gradient_norm
        if math.isfinite(event.loss + event.seconds + event.learning_rate + norm):
            return _step_line(event)
    values: dict[str, Any] = {"kind": event.kind}
    for name in _NAMES[type(event)]:
        values[name] = getattr(event, name)
    try:
        return _encode(values)
    except ValueError:
        return _encode(_spell(values))


def from_json(line: str) -> Event:
    """Read an event back from its line."""
    try:
        values = json.loads(line)
        made = _KINDS[values.pop("kind")]
        for name in _MAY_HOLD_NUMBERS[made]:
            values[name] = _unspell(values[name])
        return made(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"not an event of this version of paceline: {line.strip()[:80]!r} ({error}). "
            "Read the file with the version that wrote it, or drop the line."
        ) from error


def _step_line(event: StepFinished) -> str:
    # Written out, because a step may take a millisecond: 3.3 us where the encoder took 8.5.
    norm = "null" if event.gradient_norm is None else float(event.gradient_norm)
    return (
        f'{{"kind":"step","time":{event.time!r},"step":{event.step},"epoch":{event.epoch},'
        f'"loss":{float(event.loss)!r},"samples":{event.samples},"seconds":{float(event.seconds)!r},'
        f'"learning_rate":{float(event.learning_rate)!r},"gradient_norm":{norm},"auxiliary":{{}}}}'
    )


def _spell(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spell(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_spell(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _unspell(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unspell(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_unspell(each) for each in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value

"""Events and promises as sentences for a person: the lines of a plain log, and what stands above the live line."""

from __future__ import annotations

from paceline.observe import formats
from paceline.observe.events import (
    CheckpointDamaged,
    CheckpointSaved,
    EpochFinished,
    Evaluated,
    Event,
    Note,
    Profiled,
    Regrouped,
    RunFailed,
    RunStarted,
    Straggling,
    WorkerLost,
)
from paceline.observe.pace import Pace

GAP = "  "
SHOWN = 3
"""How many of the auxiliary terms and reported values have room in the line of progress."""
MEANING = {
    "bitwise": "same bits for any number of workers",
    "numeric": "same answer up to rounding for any number of workers",
}
"""What each level promises for one number of shards."""
STATISTICAL = "same answer only in expectation"
FOLLOWS = "workers"
"""What `shards_from` is where nobody said how many shards there are, and so there is one per worker."""


def promise(level: str, shards: int | None, shards_from: str | None) -> str:
    """Return what a level of exactness means for a run.

    Where the shards follow the workers, it names the option that gives the same bits elsewhere.
    """
    if level not in MEANING:
        return STATISTICAL if level == "statistical" else ""
    if shards is None:
        return MEANING[level]
    if shards_from == FOLLOWS and shards == 1:
        return "one shard, for one worker: --shards V gives the same bits for 1 to V workers"
    if shards_from == FOLLOWS:
        return f"{MEANING[level]} with --shards {shards}"
    return f"{MEANING[level]} ({formats.plural(shards, 'shard')})"


def describe(event: Event, pace: Pace) -> str | None:  # noqa: C901, PLR0911, PLR0912 - one branch for each event
    """Return what happened in one line; None for events that need no line of their own."""
    match event:
        case RunStarted():
            return _started(event)
        case EpochFinished(epoch=epoch, step=step, loss=loss):
            return f"{epoch_of(epoch, pace)} done at step {formats.count(step)}: loss {formats.number(loss)}"
        case Evaluated():
            measured = ", ".join(
                f"{name.replace('_', ' ')} {formats.metric(name, value)}"
                for name, value in event.metrics.items()
            )
            on = f"({formats.plural(event.samples, 'sample')} in {formats.duration(event.seconds)})"
            return f"evaluated at step {formats.count(event.step)}: {measured or 'no metrics'} {on}"
        case CheckpointSaved(step=step, path=path, seconds=seconds):
            return f"checkpoint of step {formats.count(step)} saved in {formats.duration(seconds)}: {path}"
        case CheckpointDamaged(path=path, reason=reason):
            return f"checkpoint {path} is damaged and was passed over: {reason}"
        case Note(text=text):
            return f"note: {text}"
        case Profiled():
            return profile_table(event)
        case Straggling(rank=rank, host=host, times=times, waits_for=waits_for):
            if not waits_for:
                return f"rank {rank} on {host} keeps up with the others again"
            return f"rank {rank} on {host} takes {times:.1f} times as long as the others, waiting for {waits_for}"
        case WorkerLost(rank=rank, host=host, reason=reason, trace=trace):
            return f"rank {rank} on {host} {reason}" + (f":\n{trace.rstrip()}" if trace else "")
        case Regrouped(workers=workers, step=step, reason=reason, seconds=seconds):
            who = f"{formats.plural(workers, 'worker')} from step {formats.count(step)} on"
            return f"{reason}: regrouped in {formats.duration(seconds)}, {who}{_handed_over(event)}"
        case RunFailed(rank=rank, host=host, reason=reason):
            return f"rank {rank} on {host} failed: {reason}"
        case _:
            return None


def profile_table(event: Profiled) -> str:
    """Return where the time of a step went as a table, and where its trace is."""
    columns = {"host": event.host_s, "GPU": event.device_s} if event.device_s else {"host": event.host_s}
    width = max(map(len, event.host_s))
    lines = [f"where the time of a step goes (rank 0, mean of {formats.plural(event.steps, 'step')}):"]
    lines.append(GAP + " " * width + "".join(f"{name:>18}" for name in columns))
    for name in event.host_s:
        cells = [_cell(column[name], sum(column.values())) for column in columns.values()]
        lines.append(f"{GAP}{name:<{width}}{''.join(cells)}")
    totals = [_cell(sum(column.values()), sum(column.values())) for column in columns.values()]
    lines.append(f"{GAP}{'step':<{width}}{''.join(totals)}")
    if event.path:
        lines.append(f"trace, for https://ui.perfetto.dev or chrome://tracing: {event.path}")
    return "\n".join(lines)


def _cell(seconds: float, whole: float) -> str:
    share = seconds / whole if whole else 0.0
    return f"{formats.milliseconds(seconds * 1e3):>12}{f'{share:.0%}'.replace('%', ' %'):>6}"


_SOURCES = {
    "workers": "the parts of the state came from the workers",
    "copies": "the lost part of the state came from the copies in the workers' memory",
    "checkpoint": "the lost part of the state came from the last checkpoint",
    "beginning": "the state is made anew from the seed",
}


def _handed_over(event: Regrouped) -> str:
    if not event.source:
        return ""
    redone = f", {formats.plural(event.redone, 'step')} to do again" if event.redone else ""
    return f"; {_SOURCES[event.source]}{redone}"


def fields(pace: Pace) -> dict[str, str]:
    """Return the parts of the progress line that are known, in reading order."""
    last, run = pace.last, pace.run
    if last is None:
        return {"step": "waiting for the first step"}
    total = f"/{run.total_steps:,}" if run and run.total_steps else ""
    parts = {
        "step": f"step {last.step:,}{total}",
        "epoch": epoch_of(last.epoch, pace),
        "loss": f"loss {formats.number(last.loss)}",
    }
    shown = [*last.auxiliary.items(), *pace.logged.items()][:SHOWN]
    if shown:
        parts["logged"] = GAP.join(f"{name} {formats.number(value)}" for name, value in shown)
    if (speed := pace.samples_per_second) is not None and (each := pace.seconds_per_step) is not None:
        parts["speed"] = f"{formats.count(speed)} samples/s"
        parts["each"] = f"{formats.milliseconds(each * 1000)}/step"
    if pace.slow:
        parts["slow"] = ", ".join(f"rank {rank} waits for {what}" for rank, what in sorted(pace.slow.items()))
    if (left := pace.seconds_left) is not None:
        parts["left"] = f"{round(left)} s left" if left < 59.5 else f"{formats.duration(left)} left"
    return parts


def epoch_of(epoch: int, pace: Pace) -> str:
    """Name an epoch as people count: from 1."""
    total = f"/{pace.run.epochs}" if pace.run and pace.run.epochs else ""
    return f"epoch {epoch + 1}{total}"


def _started(run: RunStarted) -> str:
    where = f"{formats.plural(run.workers, 'worker')} ({run.device}, {run.backend})"
    parts = [
        f"{run.task}: {run.strategy} on {where}",
        f"{run.exactness}: {promise(run.exactness, run.shards, run.shards_from)}",
        formats.plural(run.parameters, "parameter"),
    ]
    if run.samples is not None:
        parts.append(formats.plural(run.samples, "sample"))
    parts.append(f"batch {formats.count(run.batch_size)}")
    if run.start_step:
        parts.append(f"resumed at step {formats.count(run.start_step)}")
    return " · ".join(parts)

"""Steps that end whichever worker takes them by a signal: a sample that crashes a decoder, or one too large for the memory.

A death by a signal is survived, so a step that brings it about would use up worker after worker. Imports torch only to name the
samples, where that ends the run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.data.shards import batch_bounds, shard_bounds, steps_per_epoch
from paceline.errors import PacelineError
from paceline.launch.failures import WorkerFailure
from paceline.observe.formats import plural
from paceline.records.receipt import Receipt

_SHOWN = 8


class DeadlySteps:
    """Which shards workers carried that died by a signal, by the step they died in."""

    def __init__(self) -> None:
        self._died: dict[int, list[tuple[int, frozenset[int]]]] = {}
        """With the number of the attempt: two that die at once died of one thing."""

    def second(self, failure: WorkerFailure, attempt: int, shards: range) -> WorkerFailure | None:
        """Note a death in a step; return what ends the run where another worker died there of the same shards before."""
        if failure.step is None or not shards:
            return None
        carried = frozenset(shards)
        for before, others in self._died.get(failure.step, []):
            if before != attempt and (both := carried & others):
                return replace(failure, shards=tuple(sorted(both)))
        self._died.setdefault(failure.step, []).append((attempt, carried))
        return None


def explain(failure: WorkerFailure, out: Path | None) -> WorkerFailure:
    """Return the failure that a deadly step ends a run with, in words: its shards, and their samples where the records tell."""
    if not failure.shards:
        return failure
    which = ", ".join(map(str, failure.shards))
    samples = _samples(failure, out)
    named = f" (samples {', '.join(map(str, samples[:_SHOWN]))}" if samples else ""
    if named:
        named += f" and {plural(len(samples) - _SHOWN, 'other')})" if len(samples) > _SHOWN else ")"
    noun = "shard" if len(failure.shards) == 1 else "shards"
    return replace(
        failure,
        message=f"{failure.message} in step {failure.step}, and so was another worker before it with the same data, {noun} "
        f"{which}{named}: whoever takes this step is lost, so the run ends. Look at these samples, and at the memory they need",
    )


def _samples(failure: WorkerFailure, out: Path | None) -> list[int]:
    """Return the samples of a failure's shards, from what the last group wrote down of the data; none where that is not known."""
    from paceline.data.permutation import EpochPermutation

    if out is None or failure.step is None:
        return []
    try:
        receipt = Receipt.read(out)
    except (PacelineError, OSError):
        return []
    start = receipt.last
    if start.stream or not start.samples or failure.step < start.step:
        return []
    per_epoch = steps_per_epoch(start.samples, receipt.batch_size) * start.repeats
    epochs, step = divmod(start.step_of_epoch + failure.step - start.step, per_epoch)
    first, last = batch_bounds(step // start.repeats, receipt.batch_size, start.samples)
    bounds = [shard_bounds(shard, receipt.shards, last - first) for shard in failure.shards]
    order = EpochPermutation(start.samples, start.order_seed, start.shuffle)
    found = [order.indices(start.epoch + epochs, first + low, first + high) for low, high in bounds]
    return [int(sample) for some in found for sample in some]

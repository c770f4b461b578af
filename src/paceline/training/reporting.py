"""What a loop of the user's own reports of a step beside its loss: `run.log`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import InputError
from paceline.observe import Logged, Note
from paceline.recovery.membership import EVALUATE
from paceline.task import Mean
from paceline.training.core import EngineCore
from paceline.training.user_loop.replay import LoopReplay
from paceline.world import all_gather_object

CALLED = "run.log"
Sums = tuple[list[float], list[float]]
"""What a worker adds to a mean: totals and weights, as many as it gave."""


@dataclass(kw_only=True)
class Reporting:
    """Emits numbers that are the same on all workers, and means that all of them have a part in."""

    core: EngineCore
    replay: LoopReplay

    def log(self, values: Mapping[str, Any]) -> None:
        """Emit some values for the step that was applied last: rank 0's numbers, everybody's means."""
        state = self.core.state
        state.check_between(CALLED)
        _check_names(values)
        if (state.step is not None and state.step.again) or self.replay.in_progress:
            return
        means = {name: value for name, value in values.items() if isinstance(value, Mean)}
        found = self._combined(means) if means else {}
        if found is None or not state.world.is_first:
            return
        read = {
            name: found[name] if name in found else _number(name, value) for name, value in values.items()
        }
        if read:
            at = state.position
            self.core.state.emit(Logged(step=at.number, epoch=at.epoch, values=read))

    def _combined(self, means: Mapping[str, Mean]) -> dict[str, float] | None:
        """Return the means over all workers of a step; None where a worker's part of it was lost with the worker."""
        state = self.core.state
        step = state.step
        if step is None or not step.closing:
            raise InputError(
                "run.log takes a paceline.Mean in the body of a step, behind step.apply(): its sum and weight are those of this "
                "worker's batches of the step. Elsewhere log a number, or ask run.evaluate."
            )
        mine = {name: _sums(name, mean) for name, mean in sorted(means.items())}

        def gather() -> dict[str, float] | None:
            if not step.is_whole:
                return None
            parts: list[dict[str, Sums] | None] = all_gather_object(
                state.world.comm, mine if state.world.counts_samples else None
            )
            held = [one for one in parts if one is not None]
            first, *others = sorted({tuple(one) for one in held})
            if others:
                raise InputError(
                    f"run.log got the means {first} on one worker and {others[0]} on another. "
                    "Log the same ones on all: Mean(0, 0) where there was nothing to count."
                )
            return {name: _mean([one[name] for one in held]) for name in mine}

        found = self.core.recovery.together(EVALUATE, gather, called=CALLED)
        if found is None and state.world.is_first:
            text = f"step {step.number}: run.log reports no mean of it, for a worker was lost with its part"
            state.emit(Note(text=text))
        return found


def _mean(parts: list[Sums]) -> float:
    """Return a mean whose sums are rounded once, whatever their order: the same for any number of workers."""
    total = math.fsum(one for totals, _ in parts for one in totals)
    weight = math.fsum(one for _, weights in parts for one in weights)
    return total / weight if weight else math.nan


def _sums(name: str, mean: Mean) -> Sums:
    totals, weights = _numbers(mean.total), _numbers(mean.weight)
    if not all(math.isfinite(one) for one in weights):
        raise InputError(f"run.log: the weight of {name} is {mean.weight}, but must be a number.")
    # fsum takes no infinities of both signs, and one of them makes the mean what it is anyway.
    odd = [one for one in totals if not math.isfinite(one)]
    return (odd and [math.nan if len(set(map(repr, odd))) > 1 else odd[0]]) or totals, weights


def _numbers(given: Any) -> list[float]:
    """Return one number, or all of a tensor's, as Python's own."""
    if isinstance(given, torch.Tensor):
        return [float(one) for one in given.detach().flatten().tolist()]
    return [float(given)]


def _number(name: str, given: Any) -> float:
    """Return a number of Python's, a tensor's or numpy's; on a GPU this waits for it."""
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"run.log got {name}={given!r:.60}, which is no number. Give a number, or a paceline.Mean."
        ) from None


def _check_names(values: Mapping[str, Any]) -> None:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) and name for name in values):
        raise InputError(
            'run.log takes names and values: run.log({"accuracy": paceline.Mean(right, count)}).'
        )

"""In which order each worker of a pipeline computes and sends: torch's schedules, laid out as one program a worker.

Stage s is held by worker s modulo the number of workers. Where one stage's work is done, its message is put into the
programs of sender and receiver at the same moment of a simulated run; so there is one order of everything that both
keep to, and nobody waits in a circle. A number of micro-batches that a schedule cannot take is rounded up, and what
belongs to the surplus ones is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from torch import nn

SEVERAL = ("interleaved", "zero-bubble")
"""Schedules for workers that hold several stages."""


class ActionKind(StrEnum):
    """What a worker does next."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward of the input"
    BACKWARD_WEIGHT = "backward of the weights"
    SEND_OUTPUT = "send output"
    RECEIVE_INPUT = "receive input"
    SEND_GRADIENT = "send gradient"
    RECEIVE_GRADIENT = "receive gradient"


@dataclass(frozen=True)
class Action:
    """One thing done for one micro-batch at one stage."""

    kind: ActionKind
    stage: int
    micro: int


Program = tuple[Action, ...]
_TORCH = {
    "FORWARD": ActionKind.FORWARD,
    "FULL_BACKWARD": ActionKind.BACKWARD,
    "BACKWARD_INPUT": ActionKind.BACKWARD_INPUT,
    "BACKWARD_WEIGHT": ActionKind.BACKWARD_WEIGHT,
}


def stages_per_worker(schedule: str) -> int:
    """Return how many stages each worker holds if nobody says otherwise."""
    return 2 if schedule in SEVERAL else 1


def fewest(schedule: str, workers: int) -> int:
    """Return how many micro-batches a schedule needs to keep its workers busy."""
    return 1 if schedule == "gpipe" else workers


@lru_cache(maxsize=64)
def programs(schedule: str, workers: int, stages: int, micros: int) -> tuple[Program, ...]:
    """Return each worker's program for a step of so many micro-batches."""
    computed = _computed(schedule, workers, stages, micros)
    return _with_messages([[one for one in part if one.micro < micros] for part in computed], workers, stages)


@lru_cache(maxsize=64)
def forward_programs(workers: int, stages: int, micros: int) -> tuple[Program, ...]:
    """Return each worker's program for a pass without gradients."""
    computed = [_forward(range(worker, stages, workers), micros) for worker in range(workers)]
    return _with_messages(computed, workers, stages)


def _computed(schedule: str, workers: int, stages: int, micros: int) -> list[list[Action]]:
    if schedule == "gpipe":
        return [_all_then_all(range(worker, stages, workers), micros) for worker in range(workers)]
    if schedule == "1f1b":
        return [_one_and_one(worker, stages, micros) for worker in range(workers)]
    return _of_torch(schedule, workers, stages, -(-micros // workers) * workers)


def _forward(held: range, micros: int) -> list[Action]:
    return [Action(ActionKind.FORWARD, stage, micro) for stage in held for micro in range(micros)]


def _all_then_all(held: range, micros: int) -> list[Action]:
    backward = [
        Action(ActionKind.BACKWARD, stage, micro) for stage in reversed(held) for micro in range(micros)
    ]
    return _forward(held, micros) + backward


def _one_and_one(stage: int, stages: int, micros: int) -> list[Action]:
    ahead = min(micros, stages - 1 - stage)
    order = [Action(ActionKind.FORWARD, stage, micro) for micro in range(ahead)]
    for micro in range(micros):
        if micro + ahead < micros:
            order.append(Action(ActionKind.FORWARD, stage, micro + ahead))
        order.append(Action(ActionKind.BACKWARD, stage, micro))
    return order


def _of_torch(schedule: str, workers: int, stages: int, micros: int) -> list[list[Action]]:
    """Return torch's order of a schedule; of a stage torch needs only its index."""
    from torch.distributed.pipelining import (  # a second
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
    )

    seats: Any = [
        SimpleNamespace(
            stage_index=stage, num_stages=stages, group_size=workers, group_rank=0, submod=nn.Identity()
        )
        for stage in range(0, stages, workers)
    ]
    made = (ScheduleInterleaved1F1B if schedule == "interleaved" else ScheduleInterleavedZeroBubble)(
        seats, micros
    )
    return [
        [
            Action(_TORCH[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in made.pipeline_order[worker]
            if action is not None and action.microbatch_index is not None
        ]
        for worker in range(workers)
    ]


def _with_messages(computed: list[list[Action]], workers: int, stages: int) -> tuple[Program, ...]:
    """Run all programs by the clock, one computation a worker at a time, and put in the messages as they fall due."""
    programs: list[list[Action]] = [[] for _ in range(workers)]
    places, done = [0] * workers, set[tuple[bool, int, int]]()
    while any(place < len(part) for place, part in zip(places, computed, strict=True)):
        finished = []
        for worker, part in enumerate(computed):
            if places[worker] < len(part) and _ready(part[places[worker]], done, stages):
                finished.append((worker, part[places[worker]]))
                programs[worker].append(part[places[worker]])
                places[worker] += 1
        if not finished:
            raise RuntimeError(f"the schedule of {stages} stages on {workers} workers waits for itself")
        for worker, action in finished:
            if action.kind is ActionKind.BACKWARD_WEIGHT:
                continue
            forward = action.kind is ActionKind.FORWARD
            done.add((forward, action.stage, action.micro))
            other = action.stage + (1 if forward else -1)
            if 0 <= other < stages:
                sent, taken = (
                    (ActionKind.SEND_OUTPUT, ActionKind.RECEIVE_INPUT)
                    if forward
                    else (ActionKind.SEND_GRADIENT, ActionKind.RECEIVE_GRADIENT)
                )
                programs[worker].append(Action(sent, action.stage, action.micro))
                programs[other % workers].append(Action(taken, other, action.micro))
    return tuple(map(tuple, programs))


def _ready(action: Action, done: set[tuple[bool, int, int]], stages: int) -> bool:
    """Return whether all that a computation needs has been computed."""
    stage, micro = action.stage, action.micro
    if action.kind is ActionKind.FORWARD:
        return stage == 0 or (True, stage - 1, micro) in done
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return (False, stage, micro) in done
    return (True, stage, micro) in done and (stage == stages - 1 or (False, stage + 1, micro) in done)

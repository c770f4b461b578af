"""Draws up which faults a chaos run meets, from a seed: spread over its steps, and so that each can go off. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import InputError, UnknownNameError
from paceline.option_fields import Options, ranged, required
from paceline.ranges import COUNT, SECONDS, SEED, SHARDS, STEPS, WORKERS
from paceline.verify.chaos.faults import (
    BREAKING,
    DISK,
    FREEZE,
    JOIN,
    KILL,
    KINDS,
    LATE,
    LAUNCHERS,
    LEAVE,
    PIPE,
    SLOW,
    Fault,
    points_of,
)
from paceline.world.fault_points import CHECKPOINT, EVALUATION, POINTS, REGROUP

STEPS_PER_FAULT = 10
"""How many steps a run takes for each fault, unless it is told otherwise."""
FEWEST_STEPS_PER_FAULT = 2
SAVE_EVERY = 10
"""At most so many steps from one checkpoint to the next."""
REPLACEMENT_S = 1.0
"""About how long a replacement takes to come: so much time is given to it before the next fault."""
SLOW_S = (0.1, 0.3)
STANDSTILL = (1.2, 1.6)
"""How long workers or readers stand still that are to be taken for hung ones, of the time-out for those."""
USUAL_POINTS = tuple(point for point in POINTS if point != EVALUATION)
"""Where faults go off unless it is said: not every task measures anything."""
PAIRS = 4
"""One in so many faults goes off together with another."""


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """All faults of a run, in the order of their steps, and what the run needs to meet them."""

    faults: tuple[Fault, ...]
    steps: int
    workers: int
    save_every: int
    pause: float = 0.0
    """Seconds that a step is held back while a worker is missing, so that its replacement can join in time."""

    def workers_at(self, step: int) -> int:
        """Return how many workers there should be."""
        asked = [fault.workers for fault in self.faults if fault.kind == JOIN and fault.step <= step]
        return asked[-1] if asked else self.workers


@dataclass(frozen=True, kw_only=True)
class PlanRequest(Options):
    """How many faults, of which kinds, at which points, in what kind of run."""

    faults: int = required(COUNT)
    steps: int = required(STEPS)
    workers: int = required(WORKERS)
    shards: int = required(SHARDS)
    seed: int = ranged(0, SEED)
    kinds: tuple[str, ...] = tuple(KINDS)
    points: tuple[str, ...] = USUAL_POINTS
    hang_timeout: float = ranged(3.0, SECONDS)
    sizes: tuple[int, ...] = ranged((), WORKERS)
    """How many workers a join may ask for, where not every number up to the shards can be laid out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_names("kind of fault", self.kinds, tuple(KINDS))
        _check_names("point", self.points, POINTS)
        if self.steps < (fewest := FEWEST_STEPS_PER_FAULT * self.faults + 2):
            raise InputError(
                f"{self.faults} faults do not fit into {self.steps} steps. Use --steps {fewest} or more, or fewer --faults."
            )
        if JOIN in self.kinds and self.sizes and set(self.sizes) <= {self.workers}:
            raise InputError(
                f"a fault of the kind {JOIN} needs another number of workers than {self.workers} that the strategy can be laid "
                f"out on with {self.shards} shards. Leave {JOIN} out of --kinds, or give more --shards."
            )
        for kind in self.kinds:
            if not set(self.points) & set(points_of(kind)):
                raise InputError(
                    f"a fault of the kind {kind} goes off at {' or '.join(points_of(kind))}, which --points leaves out."
                )
        if set(self.points) == {REGROUP}:
            raise InputError(
                "a fault in the regroup needs another that brings the regroup about. Add a point to --points."
            )


def make_plan(request: PlanRequest) -> FaultPlan:
    """Draw up the faults; the same request gives the same plan."""
    # Not from world/seeds.py, which would load torch into the launcher: nothing that is computed depends on it.
    draw = random.Random(request.seed)  # noqa: S311
    groups = _groups(request, draw)
    gap = (request.steps - 2) / len(groups)
    save_every = max(1, min(SAVE_EVERY, int(gap) // 2))
    dues = _Dues(save_every, request.steps)
    faults: list[Fault] = []
    for place, group in enumerate(groups):
        step = 1 + int(place * gap) + draw.randrange(max(1, int(gap) // 2))
        if group[0].point == CHECKPOINT:
            step = dues.take(step, alone=group[0].kind == DISK)
        faults += [replace(fault, step=step) for fault in group]
    return FaultPlan(
        faults=tuple(_sized(_numbered(faults), request, draw)),
        steps=request.steps,
        workers=request.workers,
        save_every=save_every,
        pause=min(REPLACEMENT_S / max(1.0, gap), request.hang_timeout / 4),
    )


def _check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    if not names:
        raise InputError(f"no {what} is given. Known: {', '.join(known)}.")
    for name in names:
        if name not in known:
            raise UnknownNameError(what, name, known)


def _groups(request: PlanRequest, draw: random.Random) -> list[list[Fault]]:
    """Return what goes off together: one fault, two at once, or one and another in the regroup that it causes."""
    leads, riders = _drawn(request, draw)
    breaking = [lead for lead in leads if lead.kind in BREAKING]
    groups = {lead.number: [lead] for lead in leads}
    for place, rider in enumerate(riders):
        lead = breaking[place % len(breaking)]
        groups[lead.number].append(replace(rider, after=lead.number))
    alone = [
        lead
        for lead in leads
        if len(groups[lead.number]) == 1
        and lead.kind not in (JOIN, DISK, LATE, *LAUNCHERS)
        and lead.point != CHECKPOINT
    ]
    for _ in range(len(alone) // PAIRS):
        first, second = alone.pop(), alone.pop()
        if first.point not in points_of(second.kind) or first.kind == second.kind == KILL:
            continue  # two kills in one step, one after the other, would be the step's own fault
        del groups[second.number]
        other = (first.rank + 1 + draw.randrange(request.workers - 1)) % request.workers
        groups[first.number].append(replace(second, point=first.point, rank=other))
    made = list(groups.values())
    draw.shuffle(made)
    return made


def _drawn(request: PlanRequest, draw: random.Random) -> tuple[list[Fault], list[Fault]]:
    """Draw kinds and points evenly; apart from each other those that come by themselves and those in a regroup."""
    kinds = [request.kinds[place % len(request.kinds)] for place in range(request.faults)]
    draw.shuffle(kinds)
    decks: dict[tuple[str, ...], list[str]] = {}
    leads: list[Fault] = []
    riders: list[Fault] = []
    for number, kind in enumerate(kinds):
        # One deck for all kinds that have the same points: so few faults see many points.
        points = tuple(point for point in points_of(kind) if point in request.points)
        deck = decks.setdefault(points, [])
        if not deck:
            deck += draw.sample(points, len(points))
        point = deck.pop()
        fault = Fault(
            number=number,
            kind=kind,
            point=point,
            step=0,
            rank=0 if point == CHECKPOINT else draw.randrange(request.workers),
            seconds=_seconds(kind, request.hang_timeout, draw),
        )
        (riders if point == REGROUP else leads).append(fault)
    # Each of those in a regroup needs one of the others; where there are too few, it comes by itself.
    while riders and len(riders) > sum(lead.kind in BREAKING for lead in leads):
        fault = riders.pop()
        point = draw.choice(
            [point for point in points_of(fault.kind) if point in request.points and point != REGROUP]
        )
        leads.append(replace(fault, point=point, rank=0 if point == CHECKPOINT else fault.rank))
    return leads, riders


def _seconds(kind: str, hang_timeout: float, draw: random.Random) -> float:
    """Return how long something stands still in a fault of one kind."""
    if kind == SLOW:
        return round(min(draw.uniform(*SLOW_S), hang_timeout / 3), 2)
    return round(hang_timeout * draw.uniform(*STANDSTILL), 2) if kind in (LATE, FREEZE, PIPE) else 0.0


class _Dues:
    """The steps after which a checkpoint is due, the last of the run left out: that one must not fail."""

    def __init__(self, every: int, steps: int) -> None:
        self._all = range(every, steps, every)
        self._taken: set[int] = set()

    def take(self, step: int, *, alone: bool) -> int:
        """Return the next one; `alone` one that no other fault shares, because a failed write is not done again."""
        chosen = min(self._all, key=lambda due: (alone and due in self._taken, due < step, abs(due - step)))
        if alone:
            self._taken.add(chosen)
        return chosen


def _numbered(faults: list[Fault]) -> list[Fault]:
    """Number the faults in the order of their steps."""
    ordered = sorted(faults, key=lambda fault: (fault.step, fault.after is not None, fault.number))
    numbers = {fault.number: number for number, fault in enumerate(ordered)}
    return [
        replace(
            fault,
            number=numbers[fault.number],
            after=None if fault.after is None else numbers[fault.after],
        )
        for fault in ordered
    ]


def _sized(faults: list[Fault], request: PlanRequest, draw: random.Random) -> list[Fault]:
    """Return how many workers each join asks for: another number, then back to the first."""
    joins = [fault for fault in faults if fault.kind == JOIN]
    leads = {fault.after for fault in faults if fault.after is not None}
    sized: dict[int, int] = {}
    for place, fault in enumerate(joins):
        if place % 2:
            sized[fault.number] = request.workers
            continue
        until = joins[place + 1].number if place + 1 < len(joins) else len(faults)
        # A kill of the only worker leaves nobody to regroup, and the fault in that regroup would not come.
        regroups = any(
            one.number in leads and one.kind not in (JOIN, LEAVE) for one in faults[fault.number : until]
        )
        sizes = request.sizes or range(1, request.shards + 1)
        others = [number for number in sizes if number != request.workers]
        several = [number for number in others if number > 1]
        sized[fault.number] = draw.choice(several if regroups and several else others)
    return [replace(fault, workers=sized.get(fault.number, 0)) for fault in faults]

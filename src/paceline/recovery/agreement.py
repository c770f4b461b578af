"""What the workers of a new group tell each other, and whether they can go on from where the furthest of them stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import WorkerGoneError
from paceline.recovery.position import Position
from paceline.world.kernels import check_same_kind

NEWCOMER = -1
"""The number of finished operations of a worker that joins."""


class RolledBackError(WorkerGoneError):
    """This worker cannot go on: the newest state that is whole is one that its function is past, and is to start over from."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"a worker was lost, and the newest state that is whole is that of step {number}. Go on with --resume."
        )


class WentBackError(RolledBackError):
    """The run stands at an earlier step, so what was in flight is not to be done; whoever takes steps can go on from there."""


@dataclass(frozen=True)
class OpenBody:
    """One attempt at a step, as the body of the user's loop goes through it; alike on all workers."""

    number: int
    """Of the step."""
    finished: int
    """How many operations were finished where it began: two attempts at one step differ in it."""


@dataclass(frozen=True)
class MemberReport:
    """What each tells the others when a new group has formed."""

    finished: int
    """How many operations it has finished with the others."""
    position: Position
    body: OpenBody | None
    """The attempt at a step in whose body it is, in a loop of the user's own, where nothing comes of it."""
    asks_in_body: bool
    """Whether that loop evaluates or saves in its body."""
    sharded: bool
    """Whether it holds only a part of the state."""
    redone: int
    """By how many steps it has gone back since the group broke, in attempts to form a new one."""
    dirty: bool
    """Whether the body of its loop has written to the model in a step that is to be given once more."""
    moved: bool
    """Whether the body has written to the model after the last step that was applied."""
    outside: bool
    """Whether it is between two calls of `run.steps`, or after the last: nothing there can be done once more."""
    serves: bool
    """Whether it holds weights for others, and never had a batch in its loop."""
    registers: bool
    """Whether its loop has registered states of its own."""
    kernels: str
    """What its kernels are chosen by, where bits are promised."""

    @property
    def number(self) -> int:
        """Steps taken, from the beginning of the run."""
        return self.position.number


def furthest(members: Sequence[MemberReport]) -> int:
    """Return the rank that has finished most, the lowest of equals."""
    return max(range(len(members)), key=lambda rank: (members[rank].finished, -rank))


def check_kernels(members: Sequence[MemberReport], rank: int) -> None:
    """Refuse a worker that comes to others and computes with other kernels than they do: it alone, for they can go on."""
    before = [other for other, member in enumerate(members) if member.finished != NEWCOMER]
    if before and members[rank].finished == NEWCOMER:
        check_same_kind(rank, members[rank].kernels, before[0], members[before[0]].kernels)


def broken_body(members: Sequence[MemberReport]) -> OpenBody | None:
    """Return the attempt at a step in whose body the furthest of them are, to no effect, and may wait for all others."""
    most = max(member.finished for member in members)
    asked = any(one.asks_in_body for one in members)
    return next(
        (one.body for one in members if one.finished == most and one.body is not None and asked), None
    )


def check_intact(members: Sequence[MemberReport]) -> None:
    """Raise where what the furthest worker holds is the state of no step: its loop has changed it on the way."""
    before = [member for member in members if member.finished != NEWCOMER]
    most = max(member.finished for member in before)
    ahead = [member for member in before if member.finished == most]
    missed = len(ahead) < len(before)
    if any(member.dirty or (missed and member.moved) for member in ahead):
        raise RolledBackError(ahead[0].number)


def check_computed(members: Sequence[MemberReport]) -> None:
    """Raise where only servers are left: what a loop does with its batches to what it has registered was never done there."""
    before = [member for member in members if member.finished != NEWCOMER]
    if before and all(member.serves and member.registers for member in before):
        raise RolledBackError(max(member.number for member in before))

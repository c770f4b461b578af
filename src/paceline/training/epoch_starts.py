"""Whether a stream gives what it gave where an epoch is read again: in a resumed run, and in a group that has formed anew.

Whoever goes on in the middle of an epoch reads it from its beginning, up to where the run stands. A stream that keeps a
generator or a position from one epoch to the next is elsewhere by then, or has begun anew: what is skipped would not be what
was trained on. So the contents of each epoch's first global batch are kept, in the checkpoints too, and compared.

A run that was saved at the end of an epoch has nothing of the next to compare. But a stream that begins anew in another process
begins as an epoch did that is over, though these did not all begin alike. (One with `set_epoch` may do so by intent.)
"""

from __future__ import annotations

from typing import Any

from paceline.data import StepData
from paceline.data.contents import compare
from paceline.errors import InputError
from paceline.recovery.position import Position

KEY = "stream"
"""Where a checkpoint's extra state holds the contents that epochs began with."""
_ADVICE = (
    "It keeps a generator or a position of its own from one epoch to the next, or has changed: make the generator in "
    "__iter__, from the epoch that a method set_epoch(epoch) is told."
)
NOT_COMPARED = (
    "the items of the training stream hold nothing that can be compared, such as tensors, arrays, texts or numbers. So nobody "
    "sees whether it gives the same items on all workers, and when an epoch is read again; it must. A number or a name beside "
    "each item is enough."
)
_KEPT = 4
"""Epochs: a run may go back to an earlier one."""


class EpochStarts:
    """What the last epochs of a run began with, as this worker has read them."""

    def __init__(self) -> None:
        self._contents: dict[tuple[int, int], str] = {}
        self._said = False
        self._ends: dict[str, Any] | None = None
        """What a resumed run knows of its first epoch and of the last that ended, until the next begins."""
        self._first: tuple[int, str] | None = None
        """The call of `run.steps` with the run's first epoch, and what that began with."""

    def at(self, position: Position) -> dict[str, Any] | None:
        """Return what a run that goes on from here must know, if anything is known."""
        began = self._contents.get(_epoch_of(position)) if position.step else None
        if self._first is None or (position.step and began is None):
            return None
        phase, last = next(((key[0], one) for key, one in reversed(self._contents.items())), self._first)
        first_phase, first = self._first
        return {
            "began": began or "",
            "first": first,
            "first call": first_phase,
            "last": last,
            "last call": phase,
        }

    def load(self, position: Position, kept: dict[str, Any] | None) -> None:
        """Take over what a checkpoint says of the epoch that it was saved in, or behind."""
        if kept is None:
            return
        self._first = kept["first call"], kept["first"]
        if kept["began"]:
            self._contents[_epoch_of(position)] = kept["began"]
        self._ends = kept

    def check(self, position: Position, data: StepData, *, by_epoch: bool) -> str | None:
        """Raise where the epoch that is being read began with other items when it was read before.

        Return what is to be said, once, where nothing can be compared, or where it looks so without being sure. A stream
        that goes `by_epoch`, which it is told, may begin two epochs alike for good reason.
        """
        mine = data.beginning
        if mine is not None:
            self._first = self._first or (position.phase, mine)
        if not mine:
            said, self._said = self._said, self._said or mine is not None
            return NOT_COMPARED if self._said and not said else None
        was_read = _epoch_of(position) in self._contents
        found = compare(mine, self._contents.setdefault(_epoch_of(position), mine))
        if found is not None:
            raise InputError(
                f"the training stream gives other items in epoch {position.epoch} than when that epoch was read before "
                f"({found.place}: {found.here}, and {found.there} then), so samples would be repeated and others lost. {_ADVICE} "
                "To go on with other items all the same, give it a method seek(position)."
            )
        while len(self._contents) > _KEPT:
            del self._contents[next(iter(self._contents))]
        kept, self._ends = self._ends, None
        return None if was_read or by_epoch or kept is None else _check_next(kept, position, mine)


def _check_next(kept: dict[str, Any], position: Position, mine: str) -> str | None:
    """Raise where a resumed run begins its next epoch as an earlier one, of which no two began alike; or say that it looks so.

    Only within one call of `run.steps` is it known to be the same stream.
    """
    first, last = kept["first"], kept["last"]
    if not (first and last) or compare(last, first) is None:
        return None
    if compare(mine, first) is not None and compare(mine, last) is not None:
        return None
    text = (
        f"the training stream begins epoch {position.epoch} of a resumed run as an epoch before it began, though these began "
        f"differently: it has begun anew, and gives other items than without the stop. {_ADVICE}"
    )
    if kept["first call"] == kept["last call"] == position.phase:
        raise InputError(text)
    return text


def _epoch_of(position: Position) -> tuple[int, int]:
    """Return the call of `run.steps` and the epoch: one that was left before its first step has the next call's epoch."""
    return position.phase, position.epoch

"""Whether a stream gives what it gave where an epoch is read again: in a resumed run, and in a group that has formed anew.

Whoever goes on in the middle of an epoch reads it from its beginning, up to where the run stands. A stream that keeps a
generator or a position from one epoch to the next is elsewhere by then, or has begun anew: what is skipped would not be what
was trained on. So the contents of each epoch's first global batch are kept, in the checkpoints too, and compared.

A run that was saved at the end of an epoch has nothing of the next to compare. But a stream that begins anew in another process
begins as the first epoch did. It may do so by chance, or by intent: so it is asked for that epoch a second time, for which one
that draws from a generator of its own gives other items, and for the epoch before, for which one that counts its epochs does not
give what that epoch began with. (One that counts its epochs where they end, saved after its first, cannot be told from one
whose order is fixed.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.checkpoint.tensors import plain
from paceline.data import StepData
from paceline.data.contents import ORDER, PARTS, compare
from paceline.errors import CheckpointError, InputError
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
_PURE = "Go on with the data and the order that the run began with: an order is a function of (seed, epoch) alone."
_KEPT = 4
"""Epochs: a run may go back to an earlier one."""


class EpochStarts:
    """What the last epochs of a run began with, as this worker has read them."""

    def __init__(self) -> None:
        self._contents: dict[tuple[int, int], str] = {}
        self._states: dict[tuple[int, int, int], Any] = {}
        """Of the stream behind the last steps."""
        self._said = self._said_of_states = self._unsaveable = False
        self._first: str | None = None
        """What the run's first epoch began with."""
        self._call = 0
        """The call of `run.steps` that an epoch was last read in."""
        self._call_first = ""
        """What the first epoch of that call began with."""
        self._loaded_last = ""
        """What the last epoch began with that was read before the run was resumed."""
        self._resumed = False
        """Whether the next epoch is the first of a resumed run."""

    def note_state(self, position: Position, data: StepData) -> str | None:
        """Keep the state of a stream behind the step that begins at `position`; return what is to be said, once."""
        note = data.note
        if data.state is not None and not self._unsaveable:
            try:
                state = plain(data.state, "the state of the stream")
            except CheckpointError as error:
                self._unsaveable, note = (
                    True,
                    f"{error} A resumed run reads the epoch again from its beginning.",
                )
            else:
                self._states[*_epoch_of(position), data.step + 1] = state
        while len(self._states) > _KEPT:
            del self._states[next(iter(self._states))]
        said, self._said_of_states = self._said_of_states, self._said_of_states or note is not None
        return None if said else note

    def state_at(self, position: Position) -> Any:
        """Return the state of the stream where a run stands; None where it is not known."""
        return self._states.get((*_epoch_of(position), position.step))

    def at(self, position: Position) -> dict[str, Any] | None:
        """Return what a run that continues from here must know of its epochs; None if nothing is known."""
        key = _epoch_of(position)
        began = self._contents.get(key) if position.step else None
        if self._first is None or (position.step and began is None):
            return None
        over = [one for one in self._contents if one < key]
        last = began or (self._contents[max(over)] if over else self._loaded_last)
        state = self.state_at(position)
        return {
            **({} if state is None else {"state": state}),
            "began": began or "",
            "last": last,
            "first": self._first,
            "call": self._call,
            "call's first": self._call_first,
        }

    def load(self, position: Position, kept: dict[str, Any] | None) -> None:
        """Load what a checkpoint says of the epoch that it was saved in, or after."""
        if kept is None:
            return
        self._first, self._loaded_last = kept["first"], kept["last"]
        self._call, self._call_first = kept["call"], kept["call's first"]
        if kept.get("state") is not None:
            self._states[*_epoch_of(position), position.step] = kept["state"]
        if kept["began"]:
            self._contents[_epoch_of(position)] = kept["began"]
        self._resumed = True

    def adopt(self, position: Position, theirs: Position, kept: dict[str, Any] | None) -> None:
        """Load what the others of a group know, where they stand or, where all go back, of another epoch."""
        if kept is not None and position != theirs:
            kept = {**kept, "state": None}
        if kept is not None and _epoch_of(position) != _epoch_of(theirs):
            kept = {**kept, "began": "", "last": ""}
        self.load(position, kept)
        self._resumed = False  # what this worker reads is compared with what the others read

    def suspects(self, position: Position, data: StepData) -> bool:
        """Return whether a resumed run begins its next epoch as its call of `run.steps` began."""
        mine = data.beginning
        return bool(mine) and self._call == position.phase and self._begins_as_first(position, mine or "")

    def confirm(
        self, position: Position, data: StepData, beginning_of: Callable[[int], str | None]
    ) -> str | None:
        """Raise if the stream yields other items when the same epoch is read again.

        Return what is to be said where, asked for the epoch before, it does not give what that one began with.
        """
        self._resumed = False
        mine = data.beginning or ""
        again = beginning_of(position.epoch)
        if again and compare(mine, again) is not None:
            raise InputError(
                f"the training stream begins epoch {position.epoch} of a resumed run as the first epoch began, and otherwise "
                f"when it is asked once more: it has begun anew, and gives other items than without the stop. {_ADVICE}"
            )
        if self._is_as_last(mine):
            return None
        before = beginning_of(position.epoch - 1)
        return None if before and self._is_as_last(before) else _looks_anew(position)

    def check(self, position: Position, data: StepData, *, by_epoch: bool) -> str | None:
        """Raise where the epoch that is being read began with other items when it was read before.

        Return what is to be said, once, where nothing can be compared, or where it looks so without being sure. A stream
        that goes `by_epoch`, which it is told, may begin two epochs alike for good reason.
        """
        mine = data.beginning
        if mine is None:
            return None
        note = None
        if mine and not by_epoch and self._call != position.phase and self._begins_as_first(position, mine):
            # Another call of `run.steps` may have another stream.
            note = None if self._is_as_last(mine) else _looks_anew(position)
        self._resumed = False
        if self._first is None:
            self._first = mine
        if self._call != position.phase or not self._call_first:
            self._call, self._call_first = position.phase, mine
        if not mine:
            said, self._said = self._said, True
            return None if said else NOT_COMPARED
        found = compare(mine, self._contents.setdefault(_epoch_of(position), mine))
        if found is not None and found.place in (ORDER, PARTS):
            raise InputError(
                f"{found.place} of the training data in epoch {position.epoch}: {found.here}; when that epoch was read before: "
                f"{found.there}. Samples would be repeated and others lost. {_PURE}"
            )
        if found is not None:
            raise InputError(
                f"the training stream gives other items in epoch {position.epoch} than when that epoch was read before "
                f"({found.place}: {found.here}, and {found.there} then), so samples would be repeated and others lost. {_ADVICE} "
                "To go on with other items all the same, give it a method seek(position)."
            )
        while len(self._contents) > _KEPT:
            del self._contents[next(iter(self._contents))]
        return note

    def _begins_as_first(self, position: Position, mine: str) -> bool:
        """Return whether an epoch of a resumed run begins as the first one did, of the run or of its last call."""
        if not (self._resumed and self._loaded_last) or _epoch_of(position) in self._contents:
            return False
        return any(one and compare(mine, one) is None for one in (self._call_first, self._first))

    def _is_as_last(self, mine: str) -> bool:
        return compare(mine, self._loaded_last) is None


def _looks_anew(position: Position) -> str:
    return (
        f"the training stream begins epoch {position.epoch} of a resumed run as the first epoch began, and not as the last. "
        "Where its items follow from something that it keeps itself, it has begun anew, and gives other items than without the "
        f"stop. {_ADVICE}"
    )


def _epoch_of(position: Position) -> tuple[int, int]:
    """Return the call of `run.steps` and the epoch: one that was left before its first step has the next call's epoch."""
    return position.phase, position.epoch

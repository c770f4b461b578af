"""Whether a stream gives what it gave where an epoch is read again: in a resumed run, and in a group that has formed anew.

Whoever goes on in the middle of an epoch reads it from its beginning, up to where the run stands. A stream that keeps a
generator or a position from one epoch to the next is elsewhere by then, or has begun anew: what is skipped would not be what
was trained on. So the contents of each epoch's first global batch are kept, in the checkpoints too, and compared.
"""

from __future__ import annotations

from paceline.data import StepData
from paceline.data.contents import compare
from paceline.errors import InputError
from paceline.recovery.position import Position

KEY = "stream"
"""Where a checkpoint's extra state holds the contents that its epoch began with."""
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

    def at(self, position: Position) -> str | None:
        """Return what the epoch under way began with, if that is known."""
        return self._contents.get(_epoch_of(position)) if position.step else None

    def load(self, position: Position, contents: str | None) -> None:
        """Take over what a checkpoint says of the epoch that it was saved in."""
        if contents is not None:
            self._contents[_epoch_of(position)] = contents

    def check(self, position: Position, data: StepData) -> str | None:
        """Raise where the epoch that is being read began with other items when it was read before.

        Return what is to be said, once, where nothing can be compared.
        """
        mine = data.beginning
        if not mine:
            said, self._said = self._said, self._said or mine is not None
            return NOT_COMPARED if self._said and not said else None
        found = compare(mine, self._contents.setdefault(_epoch_of(position), mine))
        if found is not None:
            raise InputError(
                f"the training stream gives other items in epoch {position.epoch} than when that epoch was read before "
                f"({found.place}: {found.here}, and {found.there} then), so samples would be repeated and others lost. It keeps "
                "a generator or a position of its own from one epoch to the next, or has changed: make the generator in "
                "__iter__, from the epoch that a method set_epoch(epoch) is told. To go on with other items all the same, give "
                "it a method seek(position)."
            )
        while len(self._contents) > _KEPT:
            del self._contents[next(iter(self._contents))]
        return None


def _epoch_of(position: Position) -> tuple[int, int]:
    """Return the call of `run.steps` and the epoch: one that was left before its first step has the next call's epoch."""
    return position.phase, position.epoch

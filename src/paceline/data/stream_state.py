"""Streams with `state_dict` and `load_state_dict`: whether they come back to where they were, and what is to be read then.

A state is only ever loaded into a copy of the stream, made before anybody iterated over it: the stream itself stays what it was,
so that an epoch can also be read from its beginning. And it is only trusted where a copy with that state gave the batch that the
stream itself gave next: a shuffle buffer, say, is lost in the states of many libraries, and its samples with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from paceline.data.contents import compare, contents_of
from paceline.data.epochs import epoch_setters, tell_epoch

_READ_AGAIN = "So a resumed run reads the epoch again from its beginning."


def has_state(dataset: Any) -> bool:
    """Return whether a stream says where it is, and can go there."""
    return callable(getattr(dataset, "state_dict", None)) and callable(
        getattr(dataset, "load_state_dict", None)
    )


class StreamStates:
    """The states of one stream."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._untouched: Any = None
        self._tried_copy = False
        self.trusted = False
        """Whether a copy with a state has given what the stream gave."""
        self.fault: str | None = None
        """Why its states are not used, for the user."""

    def begin(self) -> None:
        """Copy the stream, before it is iterated over for the first time."""
        if self._tried_copy:
            return
        self._tried_copy = True
        try:
            self._untouched = copy.deepcopy(self._dataset)
        except Exception as error:  # noqa: BLE001 - whatever an object of the user's raises
            self._give_up(f"it cannot be copied ({type(error).__name__}: {error})")

    @property
    def usable(self) -> bool:
        """Whether there is a copy that a state can be loaded into, and no fault was found."""
        return self._untouched is not None and self.fault is None

    def opened(self, epoch: int, state: Any) -> Any:
        """Return a copy of the stream that goes on where a state says."""
        made = copy.deepcopy(self._untouched)
        tell_epoch(epoch_setters(made), epoch, anew=True)
        made.load_state_dict(copy.deepcopy(state))
        return made

    def goes_on(self, epoch: int, state: Any, count: int, seed: Callable[[], None]) -> bool:
        """Return whether a state leads on: at the end of an epoch some streams begin anew with it.

        False also where that cannot be told, for the epoch can be read again.
        """
        untouched = copy.deepcopy(self._untouched)
        tell_epoch(epoch_setters(untouched), epoch, anew=True)
        seed()
        first = contents_of(list(islice(iter(untouched), count)))
        seed()
        there = list(islice(iter(self.opened(epoch, state)), count))
        found = contents_of(there)
        return not there or (first is not None and found is not None and compare(first, found) is not None)

    def of(self, reading: Any) -> Any:
        """Return the state of the stream that is being read; None where it cannot be told."""
        try:
            return copy.deepcopy(reading.state_dict())
        except Exception as error:  # noqa: BLE001
            self._give_up(f"state_dict() raised {type(error).__name__}: {error}")
            return None

    def check(self, epoch: int, state: Any, batch: list[Any], seed: Callable[[], None]) -> None:
        """Compare a batch with what a copy gives that was left with the state of before it."""
        wanted = contents_of(batch)
        if wanted is None:
            return
        try:
            seed()
            found: Iterator[Any] = iter(self.opened(epoch, state))
            again = list(islice(found, len(batch)))
        except Exception as error:  # noqa: BLE001
            self._give_up(f"with its state loaded it raised {type(error).__name__}: {error}")
            return
        theirs = contents_of(again)
        if len(again) != len(batch) or theirs is None or compare(wanted, theirs) is not None:
            self._give_up(
                "with its state loaded it gives other items than without (a shuffle buffer is lost, say)"
            )
        else:
            self.trusted = True

    def _give_up(self, why: str) -> None:
        self.trusted = False
        self.fault = f"the state_dict of the training stream is not used: {why}. {_READ_AGAIN}"

"""A step that is given once more begins as it began the first time, whatever the loop's body did in the attempt that broke.

A loop may move its learning rate, a registered score or average, or the weights in the body of a step. Where a worker was lost
in that step the body runs twice, and what it does would be done twice. Rates and registered states are put back; weights that
the body wrote to are not kept twice, so the run then goes back to where they are whole.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.strategies.base import OpenReplica
from paceline.strategies.state import options_of, set_options
from paceline.training.loop_state import LoopState, Values


class Attempt:
    """One attempt at one step, in a loop of the user's own."""

    def __init__(self, replica: Callable[[], OpenReplica], loop_state: LoopState) -> None:
        """Note what the step begins with, when it is given to the loop; `replica` returns that of the group of the day."""
        self._replica, self._loop_state = replica, loop_state
        self._options = options_of(replica().optimizer)
        self._small = loop_state.small_dicts()
        self._versions = self._count_writes()
        self._wrote = False
        self._states: Values = {}

    def begin_batches(self) -> None:
        """Note whether the body has written to the weights by now; from here on a strategy may."""
        self._wrote = self._wrote or self._count_writes() != self._versions

    def give_up(self, *, back: bool) -> None:
        """Put back what the body changed up to here: the workers have regrouped, and the step is to be given once more.

        With `back` model, optimizer and states are those of an earlier step already.
        """
        optimizer = self._replica().optimizer
        if back:
            self._wrote = False
            self._options = options_of(optimizer)
        else:
            set_options(optimizer, self._options)
            self._loop_state.give_known(self._small)
        self._states = self._loop_state.snapshot()
        self._versions = self._count_writes()

    def end(self) -> bool:
        """Put back what the body did behind that; return whether it wrote to the weights, which nobody can put back."""
        set_options(self._replica().optimizer, self._options)
        self._loop_state.load(self._states)
        return self._wrote or self._count_writes() != self._versions

    def _count_writes(self) -> list[int]:
        return [one._version for one in self._replica().model.parameters()]  # noqa: SLF001  (torch has no other name for it)

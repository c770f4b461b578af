"""What the workers found out together between two calls of `run.steps`: one that joins later comes by there too.

A worker that joins, and a run that is resumed, run the user's function from its top. They skip the calls of `run.steps` that
are over, and are given what was measured between them, so that what the loop makes of it (a learning rate, a best score, the
end of the training) is the same.
"""

from __future__ import annotations

from typing import Any

from paceline.errors import InputError

KEY = "between"
"""Where a checkpoint's extra state holds it."""


class Between:
    """The outcomes, in the order in which the user's function asked for them."""

    def __init__(self) -> None:
        self._outcomes: list[Any] = []
        self._told = 0

    def note(self, outcome: Any) -> None:
        """Keep what all workers have just found out."""
        self._outcomes.append(outcome)

    def next(self, asked: str) -> Any:
        """Return what the others found out when they came by here; `asked` is what the user's function calls."""
        if self._told == len(self._outcomes):
            raise InputError(
                f"this worker joined the run in a later call of run.steps, and the others did not call {asked} where it does, "
                "between two of them. Call it inside the loop, in after_epoch, or after a loop that ended or was left with "
                "break; where the loop's iterator has a name (it = run.steps(...)), close it behind the break: it.close()."
            )
        self._told += 1
        return self._outcomes[self._told - 1]

    def state(self) -> list[Any]:
        """Return what a worker that joins must know."""
        return self._outcomes

    def __bool__(self) -> bool:
        """Return whether anything was measured."""
        return bool(self._outcomes)

    @property
    def left(self) -> bool:
        """Whether there is an outcome that the user's function has not been given."""
        return self._told < len(self._outcomes)

    def load(self, outcomes: list[Any]) -> None:
        """Take over what the others found out."""
        self._outcomes = list(outcomes)

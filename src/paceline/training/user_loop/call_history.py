"""Which calls of `run.steps` were made, and what the workers found out together between them.

A worker that joins, and a run that is resumed, run the user's function from its top. They skip the calls of `run.steps` that
are over, and are given what was measured between them, so that what the loop makes of it (a learning rate, a best score, the
end of the training) is the same. Each outcome belongs to a call of `run.steps` and a place after it: one that a function does
not ask for again moves no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.errors import InputError
from paceline.training.user_loop.kept_state import KeptState
from paceline.training.user_loop.loop_state import Values

KEY = "between"
"""Where a checkpoint's extra state holds it."""
SAVE = "run.save"
LEFT = "run.steps"
"""The first outcome after a call: what the function's decisions may rest on, as it was when the call was left."""


class Outcomes:
    """The outcomes after each call of `run.steps`, in the order in which the user's function asked for them.

    A checkpoint that the function asked for there has its place among them: what it does up to there was done before.
    """

    def __init__(self) -> None:
        self._outcomes: dict[int, list[tuple[str, Any]]] = {}
        self._told: dict[int, int] = {}

    def note(self, call: int, asked: str, outcome: Any) -> None:
        """Keep what all workers have just found out after a call; `asked` is what the user's function calls."""
        behind = self._outcomes.setdefault(call, [])
        del behind[self._told.get(call, 0) :]  # of another run of the function, which it does not repeat
        behind.append((asked, outcome))
        self._told[call] = len(behind)

    def next(self, call: int, asked: str) -> Any:
        """Return what was found out when the run came by here, after a call."""
        place = self._place(call, asked)
        if place is None:
            raise InputError(
                f"this worker joined the run in a later call of run.steps, and the others did not call {asked} where it does, "
                "between two of them. Call it inside the loop, in after_epoch, or after a loop that ended or was left with "
                "break; where the loop's iterator has a name (it = run.steps(...)), close it after the break: it.close()."
            )
        self._told[call] = place + 1
        return self._outcomes[call][place][1]

    def holds(self, call: int, asked: str) -> bool:
        """Return whether the run came by here before, and found out what is asked for."""
        return self._place(call, asked) is not None

    def has_save(self, call: int) -> bool:
        """Return whether the run was saved after a call, at a place that the user's function has yet to come to."""
        behind = self._outcomes.get(call, [])
        return any(asked == SAVE for asked, _ in behind[self._told.get(call, 0) :])

    def left_early(self, call: int) -> bool:
        """Return whether a call was left before it came to its end."""
        return any(asked == LEFT and then["early"] for asked, then in self._outcomes.get(call, ()))

    def drop(self, call: int) -> None:
        """Forget what was found out after a call and later ones: steps of it are to be taken."""
        for one in [one for one in self._outcomes if one >= call]:
            del self._outcomes[one]
            self._told.pop(one, None)

    def _place(self, call: int, asked: str) -> int | None:
        """Return the place of the next outcome if it is of that kind; a save need not be asked for again."""
        behind = self._outcomes.get(call, [])
        place = self._told.get(call, 0)
        while asked != SAVE and place < len(behind) and behind[place][0] == SAVE:
            place += 1
        return place if place < len(behind) and behind[place][0] == asked else None

    def state(self) -> list[list[Any]]:
        """Return what a worker that joins must know, and a run that is resumed."""
        return [
            [call, asked, outcome]
            for call in sorted(self._outcomes)
            for asked, outcome in self._outcomes[call]
        ]

    def __bool__(self) -> bool:
        """Return whether anything was found out."""
        return bool(self._outcomes)

    def load(self, state: list[list[Any]]) -> None:
        """Load what was found out before."""
        self._outcomes, self._told = {}, {}
        for call, asked, outcome in state:
            self._outcomes.setdefault(call, []).append((asked, outcome))


@dataclass
class CallHistory:
    """How far this worker's function has come in its calls of `run.steps`, and the run before it."""

    calls: int = 0
    """How often `steps` has been called."""
    behind: Outcomes = field(default_factory=Outcomes)
    before: Outcomes = field(default_factory=Outcomes)
    """The outcomes after each call, and those before the first, which are saved there alone."""
    resumed: bool = False
    """Whether the run was resumed and its steps have not begun."""
    skipped: bool = False
    """Whether calls of `steps` have been gone by, and the one that the run was resumed in has not begun."""
    catches_up: bool = False
    """Whether this worker has joined a run that is in a later call of `steps`."""
    went_back: bool = False
    """Whether the run has gone back into a call of `steps` that had ended."""
    adopted: Values = field(default_factory=dict)
    """The loop's own states, as this worker was given them when it joined or went back."""

    kept: KeptState | None = None
    """The state that this worker was given when it joined, while it goes by calls of `steps` that are over."""

    @property
    def call(self) -> int:
        """The call of `steps` that the user's function is in, or after; -1 before its first."""
        return self.calls - 1

    @property
    def outcomes(self) -> Outcomes:
        """What was found out where the user's function is now, outside of `steps`."""
        return self.behind if self.calls else self.before

    @property
    def elsewhere(self) -> bool:
        """Whether the run is further than the user's function has come."""
        return self.catches_up or self.skipped

    def next_call(self) -> int:
        """Return which call of `steps` begins: the same once more where the run has gone back into it."""
        if not self.went_back:
            self.calls += 1
        return self.call

    def state(self) -> dict[str, Any]:
        """Return the outcomes, for a worker that joins."""
        return {"between": self.behind.state(), "before": self.before.state()}

    def load(self, shared: dict[str, Any]) -> None:
        """Load what `state` returned on another worker."""
        self.behind.load(shared["between"])
        self.before.load(shared["before"])

    def load_saved(self, outcomes: list[Any]) -> None:
        """Load what a checkpoint holds."""
        self.before.load([one for one in outcomes if one[0] < 0])
        self.behind.load([one for one in outcomes if one[0] >= 0])

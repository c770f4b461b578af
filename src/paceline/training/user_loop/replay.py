"""What the user's function may not do while it goes once more through what it did before: read weights as those of then.

A resumed run, and a worker that joins, go by the calls of `run.steps` that are over. What was measured after them is told again,
but the weights are those of the place where the run goes on: a loop that saves its best would write others under that name.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.utils.hooks import RemovableHandle

from paceline.errors import InputError
from paceline.training.state import RunState
from paceline.training.user_loop.call_history import CallHistory


class _Refusal:
    """A hook on `state_dict`, which refuses while the loop has its turn; a module that is copied then has it too."""

    def __init__(self, text: str, *, warns: bool) -> None:
        self._text, self._warns = text, warns
        self.on = True

    def __call__(self, *_: Any) -> None:
        if self.on and self._warns:
            self.on = False  # once is enough
            warnings.warn(self._text, RuntimeWarning, stacklevel=3)
        elif self.on:
            raise InputError(self._text)

    def __deepcopy__(self, memo: Any) -> _Refusal:
        return self

    def __reduce__(self) -> Any:
        """Refuse `torch.save(model)` just so; a copy that is saved later has nothing to refuse."""
        self()
        return _made_inert, ()


def _made_inert() -> _Refusal:
    made = _Refusal("", warns=False)
    made.on = False
    return made


@dataclass(kw_only=True)
class LoopReplay:
    """Whether the function is where it was before, and the hooks while it is."""

    state: RunState
    history: CallHistory
    _refusal: _Refusal | None = field(default=None, init=False)
    _handles: list[RemovableHandle] = field(default_factory=list, init=False)

    @property
    def in_progress(self) -> bool:
        """Whether the run is further than the user's function, which goes through what it did before."""
        state, history = self.state, self.history
        if state.waits_to_join or history.elsewhere or history.resumed:
            return True
        if state.replica_or_none is None:
            return state.options.resume
        return state.open_call is None and history.outcomes.has_save(history.call)

    def hand_over(self) -> None:
        """Return control to the loop after a call that was skipped: weights of that time cannot be read."""
        self.take_back()
        state, history = self.state, self.history
        if state.task is not None or not history.elsewhere or not history.calls:
            return
        joined = history.catches_up
        text = (
            f"state_dict() was called after call {history.call + 1} of run.steps, which this "
            f"{'worker went by when it joined' if joined else 'resumed run goes by'}: the weights are those of step "
            f"{state.position.number}, where the run goes on, not those of then. Write `if not run.replaying:` before what saves "
            "or copies them."
        )
        # To end a run because a worker joins it is worse, and the first worker's files are not its own.
        self._refusal = refusal = _Refusal(text, warns=joined and not state.world.is_first)
        self._handles = [
            *(one.register_state_dict_pre_hook(refusal) for one in state.replica.model.modules()),  # type: ignore[no-untyped-call]
            state.replica.optimizer.register_state_dict_pre_hook(refusal),
        ]

    def take_back(self) -> None:
        """End the loop's turn: from here on, paceline itself asks for weights."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._refusal is not None:
            self._refusal.on = False

    @contextmanager
    def own_turn(self) -> Iterator[None]:
        """Take the turn back for a call that the loop makes."""
        self.take_back()
        yield
        self.hand_over()

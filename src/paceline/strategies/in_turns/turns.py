"""What one worker trains in the coming step, where several optimizers take turns.

Where what adds gradients up can be wired up for a part of the model, each turn has a step state of its own, made once: then
nothing of the others is summed or sent. Elsewhere all of it is summed, and what has no turn is dropped before the update.
Passes go through every model either way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from paceline.errors import InputError, UnknownNameError
from paceline.strategies.buffers.buffers import Buffers
from paceline.strategies.in_turns.optimizers import Optimizers, TurnPart
from paceline.strategies.placement import Placement
from paceline.strategies.reducer import Reducer
from paceline.strategies.step_state import StepState


class _Replica(Protocol):
    placement: Placement
    reducer: Reducer
    step_state: StepState
    buffers: Buffers

    def make_step_state(self, mine: TurnPart | None = None) -> StepState: ...

    def make_buffers(self) -> None: ...

    def take_hold(self) -> None: ...


class ReplicaTurns:
    """Whose turn it is in one replica."""

    def __init__(self, replica: _Replica, optimizer: Optimizers) -> None:
        self._replica, self._optimizer = replica, optimizer
        self._turn: str | None = None
        self._known: dict[str, tuple[StepState, Buffers]] = {}
        """What other turns are wired up with."""

    def restart(self) -> None:
        """Begin with all optimizers: the parameters are placed anew."""
        self._known.clear()
        self._turn = self._optimizer.turn = None

    def take(self, turn: str | None) -> None:
        """Train in the coming step what one optimizer holds, or (None) what all hold."""
        if turn == self._turn:
            return
        if turn is not None and turn not in self._optimizer.optimizers:
            raise UnknownNameError("turn", turn, self._optimizer.optimizers)
        replica = self._replica
        if not replica.reducer.narrows:
            self._turn = self._optimizer.turn = turn
        elif turn is None:
            replica.take_hold()
        else:
            if self._turn is not None:
                self._known[self._turn] = replica.step_state, replica.buffers
            self._turn = self._optimizer.turn = turn
            self._switch(turn)

    def _switch(self, turn: str) -> None:
        replica = self._replica
        known = self._known.pop(turn, None)
        if known is None:
            replica.step_state = replica.make_step_state(
                TurnPart(replica.placement.part, self._optimizer, turn)
            )
            replica.make_buffers()
        else:
            replica.step_state, replica.buffers = known
        replica.reducer.switch(replica.step_state)

    def drop(self, number: int) -> None:
        """Leave no gradient of what has no turn, once every sum has arrived and the terms of the loss are added."""
        if self._turn is None:
            return
        trains, replica = self._optimizer.trains(), self._replica
        if replica.placement.computes:
            self.check_reached(number, [one for one in replica.step_state.parameters if one.grad is not None])
        step = replica.step_state
        for parameter in (*step.trained.parameters, *step.others, *replica.placement.parameters()):
            if id(parameter) not in trains:
                parameter.grad = None

    def check_reached(self, number: int, reached: Iterable[Tensor]) -> None:
        """Raise where the parameters that were `reached` by the losses of a step are none of those that this turn trains."""
        if self._turn is None:
            return
        trains = self._optimizer.trains()
        if not any(id(one) in trains for one in reached):
            raise InputError(
                f"step {number}: the loss of the turn {self._turn!r} depends on no parameter of its optimizer, so nothing would "
                "be updated. Compute it from the output of that model, without detach() or no_grad(), or name another turn."
            )

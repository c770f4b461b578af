"""Takes one round of micro-batches through this worker's stages, in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from paceline.data import copied
from paceline.strategies.pipeline.call import Function
from paceline.strategies.pipeline.order import Action, ActionKind, Program
from paceline.strategies.pipeline.p2p import Links, StageMessage, own
from paceline.strategies.pipeline.placement import StagePlacement
from paceline.strategies.pipeline.reducer import StageReducer
from paceline.strategies.pipeline.stage import Micro
from paceline.world import spans
from paceline.world.fault_points import FORWARD, hit

Returned = list[list[Tensor | None]]
"""Gradients of what a stage received, for each term of the loss."""


class PipelineRuntime:
    """One round of micro-batches, and what is in flight between the stages, by stage and micro-batch."""

    def __init__(self, placement: StagePlacement, micros: Sequence[Micro]) -> None:
        self._pipe, self._stages, self._micros = placement.pipe, placement.stages, micros
        self._first, self._final = min(self._stages), max(self._stages)
        self._links = Links(self._pipe)
        self._messages: dict[tuple[int, int], StageMessage] = {}
        self._outputs: dict[tuple[int, int], tuple[Any, list[Tensor]]] = {}
        self._gradients: dict[tuple[int, int], tuple[Returned, list[str]]] = {}
        self._complete: set[tuple[int, int]] = set()
        """Backward passes in which the weights were done together with the input."""

    def measure(self, program: Program, function: Function, after: Callable[[], None]) -> dict[int, Any]:
        """Go forward only; return, on the worker of the last stage, what the function made of each micro-batch.

        `after` is called after each pass through a stage.
        """
        made: dict[int, Any] = {}
        for action in program:
            if action.kind is ActionKind.FORWARD:
                value = self._forward(action, function)
                after()
                if self._stages[action.stage].last:
                    made[action.micro] = value
            else:
                self._carry(action)
        self._links.flush()
        return made

    def train(self, program: Program, loss: Function, reducer: StageReducer) -> None:
        """Go forward and backward; the reducer is given what comes out of each pass."""
        for action in program:
            stage, micro = self._stages[action.stage], self._micros[action.micro]
            if action.kind is ActionKind.FORWARD:
                stage.open_shard(micro)
                with spans.of[spans.FORWARD]:
                    value = self._forward(action, loss)
                    stage.close_shard(micro)
                if stage.last:
                    reducer.add_loss(micro, value)
            elif action.kind is ActionKind.BACKWARD_WEIGHT:
                if (action.stage, action.micro) not in self._complete:
                    with spans.of[spans.BACKWARD]:
                        made = [stage.backward_weight(action.micro)]
                    reducer.add_gradients(micro, stage, made)
            elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
                with spans.of[spans.BACKWARD]:
                    self._backward(action, reducer)
            else:
                self._carry(action)
        self._links.flush()

    def _forward(self, action: Action, function: Function) -> Any:
        stage, micro = self._stages[action.stage], self._micros[action.micro]
        if action.stage == self._first:
            hit(FORWARD)
            self._pipe.status_page.batch()
        if action.stage != self._final:  # the loss works on it again in a later stage, maybe in place
            micro = replace(micro, batch=copied(micro.batch))
        message = self._messages.pop((action.stage, action.micro), None)
        value = stage.forward(
            action.micro, micro, function, None if message is None else (message.note, message.tensors())
        )
        if not stage.last:
            handed, tensors = value
            self._outputs[action.stage, action.micro] = handed, [own(one) for one in tensors]
        return value

    def _backward(self, action: Action, reducer: StageReducer) -> None:
        key = action.stage, action.micro
        stage, micro = self._stages[action.stage], self._micros[action.micro]
        if stage.last:
            came: Returned = stage.starts(action.micro, reducer.step.start, reducer.terms)
        else:
            came, reducer.terms = self._returned(key)
        if action.kind is ActionKind.BACKWARD_INPUT and len(came) == 1:
            self._gradients[key] = [stage.backward_input(action.micro, came[0])], reducer.terms
            return
        inputs, made = stage.backward(action.micro, came)
        self._complete.add(key)
        self._gradients[key] = inputs, reducer.terms
        reducer.add_gradients(micro, stage, made)

    def _carry(self, action: Action) -> None:
        """Send or receive one message."""
        key, workers = (action.stage, action.micro), self._pipe.size
        if action.kind is ActionKind.SEND_OUTPUT:
            handed, tensors = self._outputs.pop(key)
            self._links.send((action.stage + 1) % workers, handed, tensors)
        elif action.kind is ActionKind.SEND_GRADIENT:
            returned, terms = self._gradients.pop(key)
            there = [[one is not None for one in term] for term in returned]
            # A function of the user's may write its gradients into the same memory in each pass back.
            tensors = [own(one) for term in returned for one in term if one is not None]
            self._links.send((action.stage - 1) % workers, (terms, there), tensors)
        else:
            side = -1 if action.kind is ActionKind.RECEIVE_INPUT else 1
            with spans.of[spans.WAITING]:
                self._messages[key] = self._links.receive((action.stage + side) % workers)

    def _returned(self, key: tuple[int, int]) -> tuple[Returned, list[str]]:
        """Return the gradients that came back, and the terms they belong to."""
        message = self._messages.pop(key)
        terms, there = message.note
        tensors = iter(message.tensors())
        return [[next(tensors) if one else None for one in term] for term in there], terms

"""Takes micro-batches through this worker's stages, in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.data import copied
from paceline.reduce.tree import Gradients
from paceline.strategies.pipeline.call import Function
from paceline.strategies.pipeline.order import Action, Kind, Program
from paceline.strategies.pipeline.p2p import Links, StageMessage
from paceline.strategies.pipeline.stage import Micro, Stage
from paceline.task import Loss
from paceline.world import World

Returned = list[list[Tensor | None]]
"""Gradients of what a stage received, for each term of the loss."""


class GradSink(Protocol):
    """Who is told what comes out of a pass."""

    terms: list[str]
    """The auxiliary terms of the loss, in order."""

    def loss(self, micro: Micro, loss: Loss) -> None:
        """Take note of a loss; told on the last stage only."""

    def gradients(self, micro: Micro, stage: Stage, made: Sequence[Gradients]) -> None:
        """Take one micro-batch's gradients of a stage's parameters, for each term."""

    def scale(self, dtype: torch.dtype) -> Tensor:
        """Return the gradient that the backward pass starts from."""


class PipelineRuntime:
    """One worker's stages and what lies between them."""

    def __init__(self, world: World, stages: Mapping[int, Stage], on_batch: Callable[[], None]) -> None:
        self._world, self._stages, self._on_batch = world, stages, on_batch
        self._links = Links(world)
        self._first, self._final = min(stages), max(stages)

    def measure(
        self, program: Program, micros: Sequence[Micro], function: Function, after: Callable[[], None]
    ) -> dict[int, Any]:
        """Go forward only; gives, on the worker of the last stage, what the function made of each micro-batch.

        `after` is called after each pass through a stage.
        """
        run = _Pass(self._links, self._world, micros)
        made: dict[int, Any] = {}
        for action in program:
            if action.kind is Kind.FORWARD:
                value = self._forward(run, action, function)
                after()
                if self._stages[action.stage].last:
                    made[action.micro] = value
            else:
                run.carry(action)
        self._links.flush()
        return made

    def train(self, program: Program, micros: Sequence[Micro], loss: Function, books: GradSink) -> None:
        """Go forward and backward."""
        run = _Pass(self._links, self._world, micros)
        for action in program:
            stage, micro = self._stages[action.stage], micros[action.micro]
            if action.kind is Kind.FORWARD:
                stage.open_shard(micro)
                value = self._forward(run, action, loss)
                stage.close_shard(micro)
                if stage.last:
                    books.loss(micro, value)
            elif action.kind is Kind.BACKWARD_WEIGHT:
                if (action.stage, action.micro) not in run.complete:
                    books.gradients(micro, stage, [stage.backward_weight(action.micro)])
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                self._backward(run, action, books)
            else:
                run.carry(action)
        self._links.flush()

    def _forward(self, run: _Pass, action: Action, function: Function) -> Any:
        stage, micro = self._stages[action.stage], run.micros[action.micro]
        if action.stage == self._first:
            self._on_batch()
        if action.stage != self._final:  # the loss works on it again in a later stage, maybe in place
            micro = replace(micro, batch=copied(micro.batch))
        message = run.messages.pop((action.stage, action.micro), None)
        value = stage.forward(
            action.micro, micro, function, None if message is None else (message.note, message.tensors())
        )
        if not stage.last:
            run.outputs[action.stage, action.micro] = value
        return value

    def _backward(self, run: _Pass, action: Action, books: GradSink) -> None:
        key = action.stage, action.micro
        stage, micro = self._stages[action.stage], run.micros[action.micro]
        if stage.last:
            came: Returned = stage.starts(action.micro, books.scale, books.terms)
        else:
            came, books.terms = run.returned(*key)
        if action.kind is Kind.BACKWARD_INPUT and len(came) == 1:
            run.gradients[key] = [stage.backward_input(action.micro, came[0])], books.terms
            return
        inputs, made = stage.backward(action.micro, came)
        run.complete.add(key)
        run.gradients[key] = inputs, books.terms
        books.gradients(micro, stage, made)


class _Pass:
    """What is in flight in one pass, by stage and micro-batch."""

    def __init__(self, links: Links, world: World, micros: Sequence[Micro]) -> None:
        self._links, self._workers = links, world.size
        self.micros = micros
        self.messages: dict[tuple[int, int], StageMessage] = {}
        self.outputs: dict[tuple[int, int], tuple[Any, list[Tensor]]] = {}
        self.gradients: dict[tuple[int, int], tuple[Returned, list[str]]] = {}
        self.complete: set[tuple[int, int]] = set()
        """Backward passes in which the weights were done together with the input."""

    def carry(self, action: Action) -> None:
        """Send or receive one message."""
        key = action.stage, action.micro
        if action.kind is Kind.SEND_OUTPUT:
            handed, tensors = self.outputs.pop(key)
            self._links.send((action.stage + 1) % self._workers, handed, tensors)
        elif action.kind is Kind.SEND_GRADIENT:
            returned, terms = self.gradients.pop(key)
            there = [[one is not None for one in term] for term in returned]
            tensors = [one for term in returned for one in term if one is not None]
            self._links.send((action.stage - 1) % self._workers, (terms, there), tensors)
        else:
            side = -1 if action.kind is Kind.RECEIVE_INPUT else 1
            self.messages[key] = self._links.receive((action.stage + side) % self._workers)

    def returned(self, stage: int, micro: int) -> tuple[Returned, list[str]]:
        """Return the gradients that came back, and the terms they belong to."""
        message = self.messages.pop((stage, micro))
        terms, there = message.note
        tensors = iter(message.tensors())
        return [[next(tensors) if one else None for one in term] for term in there], terms

"""A model cut over workers that call each other: micro-batches in flight, gradients by distributed autograd.

    pipeline = remote.Pipeline({"stage:0": first_half, "stage:1": second_half}, micro_batches=4)
    optimizer = pipeline.optimizer(torch.optim.SGD, lr=0.1)
    loss = pipeline.step(inputs, labels, loss_sum, optimizer)

Each micro-batch is a pass of its own, so its gradients stay apart on every stage; the owners add them up in the order of
the micro-batches, whichever came back first. So the weights are those of one process that takes the micro-batches in turn.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import InputError
from paceline.remote import registry
from paceline.remote.autograd import BackwardPass, Optimizer, backward_pass
from paceline.remote.calls import method, wait_all
from paceline.remote.counted_references import Reference, reference
from paceline.remote.proxy import create
from paceline.remote.registry import service
from paceline.remote.session import current

IN_FLIGHT = 16
"""How many micro-batches go forward at once: each takes a thread of every stage while it waits for the one before."""
LossSum = Callable[[Tensor, Tensor], Tensor]
"""Returns the sum of the losses of some outputs and their targets."""


@service
class RemoteStage:
    """One part of a model, on the worker that has it."""

    def __init__(self, address: str) -> None:
        made = registry.find_function(address)()
        if not isinstance(made, nn.Module):
            raise InputError(
                f"{address} made a {type(made).__name__}, not a module. Return the stage's nn.Module."
            )
        self.module = made
        self._turn = threading.Lock()

    def forward(self, given: Tensor | Reference[Tensor]) -> Tensor:
        """Compute this stage's output; its input may still be on the stage before."""
        inputs = given.fetch() if isinstance(given, Reference) else given
        with self._turn:  # one micro-batch at a time: two would only share the cores
            output: Tensor = self.module(inputs)
        return output

    def parameters(self) -> list[Reference[Tensor]]:
        """Return references to what is trained here."""
        return [reference(one) for one in self.module.parameters() if one.requires_grad]

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the weights and buffers."""
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over weights and buffers."""
        self.module.load_state_dict(state)


class Pipeline:
    """A chain of stages, each on a worker of its own."""

    def __init__(self, stages: Mapping[str, Callable[[], nn.Module]], *, micro_batches: int) -> None:
        """`stages` gives for each worker, in order, the registered function that makes its part of the model."""
        if not stages or micro_batches < 1:
            raise InputError(
                f"a pipeline of {len(stages)} stages and {micro_batches} micro-batches cannot be: give 1 or more of each."
            )
        addresses = {worker: registry.check_function(make) for worker, make in stages.items()}
        self.stages = [create(worker, RemoteStage, address) for worker, address in addresses.items()]
        self._micro_batches = micro_batches
        self._threads = ThreadPoolExecutor(micro_batches, thread_name_prefix="micro-batch")
        self._room = threading.Semaphore(IN_FLIGHT)
        current().at_close(self.close)

    def optimizer(self, made_by: type[torch.optim.Optimizer], **options: Any) -> Optimizer:
        """Make an optimizer that updates every stage where it is."""
        held = wait_all([method(stage.parameters).future() for stage in self.stages])
        return Optimizer(made_by, [one for part in held for one in part], **options)

    def step(self, inputs: Tensor, targets: Tensor, loss: LossSum, optimizer: Optimizer) -> float:
        """Train on one batch, and give its mean loss."""
        size = len(inputs)
        if size != len(targets) or size < self._micro_batches:
            raise InputError(
                f"{size} inputs and {len(targets)} targets do not make {self._micro_batches} micro-batches: give as many "
                "targets as inputs, and no fewer than micro_batches."
            )
        pieces = list(
            zip(
                inputs.tensor_split(self._micro_batches),
                targets.tensor_split(self._micro_batches),
                strict=True,
            )
        )
        flight = _Flight(len(pieces))
        tasks = [
            self._threads.submit(flight.take, place, functools.partial(self._loss, *piece, loss), size)
            for place, piece in enumerate(pieces)
        ]
        try:
            flight.wait()
            if flight.whole:
                optimizer.step(*flight.passes)
        finally:
            flight.release()
        return sum(task.result() for task in tasks) / size

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's output for some inputs, outside of training."""
        with torch.no_grad():
            return self._chain(inputs)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all weights, named by stage: `0.weight`."""
        states = wait_all([method(stage.state).future() for stage in self.stages])
        return {
            f"{place}.{name}": value for place, state in enumerate(states) for name, value in state.items()
        }

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _loss(self, inputs: Tensor, targets: Tensor, loss: LossSum) -> Tensor:
        return loss(self._chain(inputs), targets)

    def _chain(self, inputs: Tensor) -> Tensor:
        given: Tensor | Reference[Tensor] = inputs
        with self._room:
            for stage in self.stages[:-1]:
                given = method(stage.forward).remote(given)
            return self.stages[-1].forward(given)


class _Flight:
    """The micro-batches of one step: each on a thread, its pass open until the optimizer has stepped."""

    def __init__(self, count: int) -> None:
        self.passes: list[BackwardPass] = []
        self._found: dict[int, BackwardPass] = {}
        self._count = count
        self._landed = threading.Semaphore(0)
        self._released = threading.Event()

    @property
    def whole(self) -> bool:
        """Whether every micro-batch has its gradients."""
        return len(self._found) == self._count

    def take(self, place: int, loss: Callable[[], Tensor], size: int) -> float:
        """Go forward and back with one micro-batch, and keep its gradients until they are used."""
        landed = False
        try:
            with backward_pass() as pass_:
                total = loss()
                pass_.backward(total / size)
                self._found[place] = pass_
                landed = True
                self._landed.release()
                self._released.wait()
                return total.item()
        finally:
            if not landed:
                self._landed.release()

    def wait(self) -> None:
        """Wait until every micro-batch has come back, in whatever order."""
        for _ in range(self._count):
            self._landed.acquire()
        self.passes = [self._found[place] for place in sorted(self._found)]

    def release(self) -> None:
        """Let the passes end."""
        self._released.set()

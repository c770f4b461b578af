"""One process, several threads or devices, a master that adds up and updates: limited by the interpreter's lock, by design.

There is one model and one interpreter, so all that is written in Python (forward passes, losses, hooks) runs in the order of
one process, whatever it reads or keeps. On a CPU the backward passes of plain layers run on threads beside the forward passes
that follow. On several GPUs the shards go round, and the same modules compute with weights that lie there; what a GPU was
given to do it does while the next is given its own. Each shard's gradients are summed along the canonical tree.
(torch's own DataParallel splits a batch inside forward, and adds gradients in an order of its own.)
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial, reduce
from itertools import chain, cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.compat.modules import HOOKS
from paceline.compat.pytree import tree_leaves
from paceline.compat.tensors import hooks_of, share_hooks
from paceline.errors import InputError
from paceline.reduce.tree import Gradients, Subtree
from paceline.strategies import gradients
from paceline.strategies.base import BuiltInStrategy, LossFunction, ShardWork, StepWork, StrategyInputs
from paceline.strategies.guards.loss_checks import check_loss
from paceline.strategies.guards.saved_values import Graph, writes_refused
from paceline.strategies.guards.writes import Writes
from paceline.strategies.placement import WholePlacement
from paceline.strategies.reducer import Reducer
from paceline.strategies.replica import Replica
from paceline.strategies.schedule import Passes, Schedule
from paceline.strategies.step_state import StepState
from paceline.task import Loss
from paceline.world import World


class DataParallel(BuiltInStrategy):
    """Threads on a CPU, or several GPUs of one machine, under one process."""

    name = "dp"
    threaded = True

    def prepare(self, inputs: StrategyInputs, world: World) -> Replica:
        """Return a replica over the threads and devices."""
        if world.size > 1:
            raise InputError(f"--strategy dp is one process, but this is one of {world.size}. Use ddp.")
        if inputs.sync_batchnorm:
            raise InputError(
                "--sync-batchnorm needs workers that can exchange sums in mid-pass: use --strategy ddp."
            )
        if inputs.compile and other_devices(world.device, inputs.threads):
            raise InputError(
                "--compile takes the weights of one device, and dp computes with copies on several. Use --strategy ddp."
            )
        reducer = ThreadedReducer(inputs, world)
        schedule = ThreadedSchedule(inputs, world, reducer)
        placement = WholePlacement(inputs, world)
        if inputs.compile and inputs.threads > 1:
            placement.notes = [
                *placement.notes,
                "dp --compile: compiled backward passes run one after another, on one thread",
            ]
        return Replica(inputs, world, placement, reducer, schedule)


class ThreadedReducer(Reducer):
    """Backward passes that run no Python, on threads beside the forward passes that follow."""

    def __init__(self, inputs: StrategyInputs, world: World) -> None:
        super().__init__(world)
        self.threads = inputs.threads if world.device.type == "cpu" else 1
        self.beside = False
        """Whether passes of this step may run on threads."""
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="paceline-dp")
        self._running: deque[Future[Gradients]] = deque()
        self._batches: list[Callable[[], Gradients]] = []
        """The batches of the shard that is open whose backward passes run on threads."""
        self._closed: deque[tuple[Subtree, list[Callable[[], Gradients]]]] = deque()
        """Shards whose sums are not in the tree yet; it takes them from left to right."""

    def wire(self, step: StepState) -> None:
        """Take hold of what trains now."""
        super().wire(step)
        self.writes = Writes(step.model.named_parameters())

    def begin(self, work: StepWork) -> None:  # noqa: ARG002
        """Wait for what ran for a step that was given up, and forget it."""
        self.abandon()

    def abandon(self) -> None:
        """Forget the step in flight."""
        wait(self._running)
        self._running.clear()
        self._batches.clear()
        self._closed.clear()
        self.beside = False

    def backward(self, loss: Loss) -> None:
        """Add one batch's gradients, on this thread."""
        self._add_batches()
        super().backward(loss)

    def start_backward(self, loss: Loss) -> None:
        """Add one batch's gradients on another thread."""
        step = self.step
        step.enter(loss)
        if len(self._running) == self.threads:
            wait([self._running.popleft()])  # each holds the activations of its pass
        start, entry = step.starts(loss)
        running = self._pool.submit(gradients.of_leaves, loss.total, start, step.parameters)
        self._running.append(running)
        self._batches.append(lambda: [*_awaited(running), entry])

    def _add_batches(self) -> None:
        """Add what threads have computed of the open shard to `.grad`: the batch that comes next is added behind it."""
        batches, self._batches = self._batches, []
        for batch in batches:
            tracked = self.step.tracked
            summed = self.step.add([parameter.grad for parameter in tracked], batch())
            for parameter, gradient in zip(tracked, summed, strict=True):
                parameter.grad = gradient

    def close_shard(self, index: int) -> None:
        """Keep a finished shard's gradients, or what will have them."""
        if any(parameter.grad is not None for parameter in self.step.tracked):
            self._add_batches()
        batches, self._batches = self._batches or [partial(list, self.step.take())], []
        self._closed.append(((index, index + 1), batches))
        while len(self._closed) > (self.threads if self.beside else 0):
            self._add_shard()

    def _add_shard(self) -> None:
        node, (first, *later) = self._closed.popleft()
        self.step.tree.add(node, reduce(self.step.add, (batch() for batch in later), first()))

    def finish(self) -> None:
        """Wait for the threads; `.grad` holds the sums then."""
        while self._closed:
            self._add_shard()
        super().finish()


def _awaited(running: Future[Gradients]) -> Gradients:
    """Return what a thread has computed."""
    with writes_refused("dp", "Under dp the passes of the batches that follow run beside it."):
        return running.result()


class ThreadedSchedule(Schedule):
    """Takes the shards of a step in their order, and what needs no Python beside one another."""

    def __init__(self, inputs: StrategyInputs, world: World, reducer: ThreadedReducer) -> None:
        self._reducer = reducer
        self._others = [_Device(device) for device in other_devices(world.device, inputs.threads)]
        # A kind of layer that recomputes its forward pass runs Python in the backward pass.
        self._threads = reducer.threads > 1 and inputs.tuning.activation_checkpointing == "none"

    def train(self, passes: Passes, work: StepWork, loss: LossFunction) -> None:
        """Compute all shards."""
        passes.open_step(work)
        model = passes.model
        self._reducer.beside = self._threads and only_plain_layers(model)
        # What a pass writes to the weights, another device does not see, and a thread may see too early.
        watched = [self._reducer.writes] if self._reducer.beside or self._others else []
        watched += [other.refresh(model) for other in self._others]
        for writes in watched:
            writes.begin()
        for shard, where in zip(work.shards, cycle([None, *self._others]), strict=False):
            if where is None:
                self._passes(passes, shard, loss)
            else:
                with self._on(where):
                    where.run(model, partial(self._passes, passes, shard, loss))
                _check_master(model)
        for writes in watched:
            writes.check(work.number)

    def _passes(self, passes: Passes, shard: ShardWork, loss: LossFunction) -> None:
        beside = self._reducer.beside
        for batch in passes.shard(shard):
            before = _generators() if beside else None
            given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)] if beside else []
            with passes.precision.autocast():
                value = loss(passes.model, batch)
            check_loss(value)
            # A pass that has drawn may draw once more in its backward pass, from generators that all threads share.
            if before is not None and _same(before, _generators()) and _can_wait(value, passes.model, given):
                self._reducer.start_backward(value)
            else:
                passes.backward(value)

    @contextmanager
    def _on(self, where: _Device) -> Iterator[None]:
        """Have the passes work with the weights of another device."""
        step = self._reducer.step
        mine = step.parameters, step.loss_stats, step.auxiliary, step.device
        step.parameters, step.loss_stats, step.device = where.parameters, where.loss_stats, where.device
        step.auxiliary = mine[2].over(where.parameters)
        step.tracked = [*step.parameters, step.loss_stats]
        try:
            yield
            mine[2].names = step.auxiliary.names
        finally:
            step.parameters, step.loss_stats, step.auxiliary, step.device = mine
            step.tracked = [*step.parameters, step.loss_stats]


def _check_master(model: nn.Module) -> None:
    """Refuse a pass that came to the master's own weights: their gradients would be lost."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise InputError(
                f"dp computes with weights on several devices, and the forward pass or loss came to {name} on the first one, "
                "by a list, a function or an attribute that keeps it. Reach weights through the modules that own them, or "
                "use ddp."
            )


class _Device:
    """The model's weights and buffers on a device other than the master's, for one step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parameters: list[nn.Parameter] = []
        self._held: dict[str, Tensor] = {}

    def refresh(self, model: nn.Module) -> Writes:
        """Copy what the master has; returns what watches the weights here."""
        self._held, self.parameters = {}, []
        kind = gradients.ledger_type(model.parameters())
        self.loss_stats = nn.Parameter(torch.zeros(2, dtype=kind, device=self.device))
        for name, theirs in model.named_parameters():
            mine = nn.Parameter(theirs.detach().to(self.device, copy=True), theirs.requires_grad)
            share_hooks(theirs, mine)
            self._held[f"model.{name}"] = mine
            self.parameters += [mine] if mine.requires_grad else []
        for name, buffer in model.named_buffers():
            self._held[f"model.{name}"] = buffer.to(self.device, copy=True)
        return Writes(
            (name.removeprefix("model."), one)
            for name, one in self._held.items()
            if isinstance(one, nn.Parameter)
        )

    def run(self, model: nn.Module, passes: Callable[[], None]) -> None:
        """Run some passes with the model's modules over what lies here."""
        functional_call(_Around(model), self._held, (passes,))


class _Around(nn.Module):
    """A module whose forward pass is any code that uses the model, because torch lends tensors to a call of a module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, passes: Callable[[], None]) -> None:
        """Run it."""
        passes()


def other_devices(first: torch.device, workers: int) -> list[torch.device]:
    """Return the GPUs beside the master's that `workers` ask for; a CPU is one device."""
    count = min(workers, torch.cuda.device_count()) if first.type == "cuda" else 1
    return [
        torch.device("cuda", (first.index + place) % torch.cuda.device_count()) for place in range(1, count)
    ]


def only_plain_layers(model: nn.Module) -> bool:
    """Return whether all modules are torch's own and nothing is hung on them: then no backward pass runs Python of a user's.

    Buffers, and tables that a forward pass rescales, are written to while the backward pass of the shard before may read them.
    """
    return (
        next(model.buffers(), None) is None
        and not any(hooks_of(parameter) for parameter in model.parameters())
        and all(
            type(module).__module__.startswith("torch.nn.")
            and "forward" not in vars(module)
            and not any(vars(module)[table] for table in HOOKS)
            and getattr(module, "max_norm", None) is None
            for module in model.modules()
        )
    )


def _can_wait(loss: Loss, model: nn.Module, batch: Iterable[Tensor]) -> bool:
    """Return whether a backward pass may run on a thread: it is one pass, runs no Python, and nobody writes to what it reads.

    Weights are watched, and no pass writes to the batch of another.
    """
    if loss.auxiliary:
        return False
    graph = Graph([loss.total])
    return not (graph.runs_python or graph.uncounted_beyond(chain(model.parameters(), batch)))


def _generators() -> tuple[Any, ...]:
    numpy_state = np.random.get_state(legacy=False)
    return torch.get_rng_state(), numpy_state["state"], random.getstate()


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return (
        torch.equal(before[0], after[0])
        and before[1]["pos"] == after[1]["pos"]
        and np.array_equal(before[1]["key"], after[1]["key"])
        and before[2] == after[2]
    )

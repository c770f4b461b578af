"""One process, several threads or devices, a master that adds up and updates: limited by the interpreter's lock, by design.

There is one model and one interpreter, so all that is written in Python (forward passes, losses, hooks) runs in the order of
one process, whatever it reads or keeps. On a CPU the backward passes of plain layers run on threads beside the forward passes
that follow. On several GPUs the shards go round, and the same modules compute with weights that lie there; what a GPU was
given to do it does while the next is given its own. Each shard's gradients are summed along the canonical tree.
(torch's own DataParallel splits a batch inside forward, and adds gradients in an order of its own.)
"""
# ruff: noqa: SLF001  (torch has no public name for the hooks of a tensor)

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial, reduce
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.func import functional_call

from paceline.data import to_device
from paceline.errors import InputError
from paceline.reduce.tree import Gradients, Subtree
from paceline.strategies import gradients
from paceline.strategies.base import Exactness, LossFunction, OpenReplica, ShardWork, StepWork, StrategyInputs
from paceline.strategies.hooks import HOOKS, share
from paceline.strategies.result import StepResult
from paceline.strategies.sequential import SequentialReplica, check_loss
from paceline.strategies.tuning import Tuning
from paceline.strategies.writes import Writes
from paceline.task import Loss
from paceline.world import World


class DataParallel:
    """Threads on a CPU, or several GPUs of one machine, under one process."""

    name = "dp"
    exactness = Exactness.BITWISE
    threaded = True

    def level(self, tuning: Tuning) -> Exactness:  # noqa: ARG002
        """Return its own level: no tuning changes it."""
        return self.exactness

    def prepare(self, parts: StrategyInputs, world: World) -> OpenReplica:
        """Return a replica over the threads and devices."""
        if world.size > 1:
            raise InputError(f"--strategy dp is one process, but this is one of {world.size}. Use ddp.")
        if parts.sync_batchnorm:
            raise InputError(
                "--sync-batchnorm needs workers that can exchange sums in mid-pass: use --strategy ddp."
            )
        return ThreadedReplica(parts, world)


class ThreadedReplica(SequentialReplica):
    """Takes the shards of a step in their order, and what needs no Python beside one another."""

    adapts = True
    holds_unsaved = True

    def __init__(self, parts: StrategyInputs, world: World) -> None:
        super().__init__(parts, world)
        self._others = [_Device(device) for device in other_devices(world.device, parts.threads)]
        self._here = world.device
        """Where the shard that is open is computed."""
        self._threads = parts.threads if world.device.type == "cpu" else 1
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="paceline-dp")
        self._writes = Writes(self.model.named_parameters())
        self._beside = False
        self._running: deque[Future[Gradients]] = deque()
        self._batches: list[Callable[[], Gradients]] = []
        """The batches of the shard that is open whose backward passes run on threads."""
        self._closed: deque[tuple[Subtree, list[Callable[[], Gradients]]]] = deque()
        """Shards whose sums are not in the tree yet; it takes them from left to right."""

    def step(self, work: StepWork, loss: LossFunction, max_grad_norm: float | None) -> StepResult:
        """Compute all shards, add up, and update the master."""
        self.begin(work)
        # A kind of layer that recomputes its forward pass runs Python in the backward pass.
        self._beside = self._threads > 1 and self._recompute == "none" and only_plain_layers(self.model)
        # What a pass writes to the weights, another device does not see, and a thread may see too early.
        watched = [self._writes] if self._beside or self._others else []
        watched += [other.refresh(self.model) for other in self._others]
        for writes in watched:
            writes.begin()
        for shard, where in zip(work.shards, cycle([None, *self._others]), strict=False):
            if where is None:
                self._passes(shard, loss)
            else:
                with self._on(where):
                    where.run(self.model, partial(self._passes, shard, loss))
                self._check_master()
        self.combine()
        for writes in watched:
            writes.check(work.number)
        return self.apply(max_grad_norm)

    def _rewire(self) -> None:
        super()._rewire()
        self._writes = Writes(self.model.named_parameters())

    def begin(self, work: StepWork) -> None:
        """Start a step; what ran for one that was given up is waited for and forgotten."""
        self._forget()
        super().begin(work)

    def abandon(self) -> None:
        """Forget the step under way."""
        self._forget()
        super().abandon()

    def _forget(self) -> None:
        wait(self._running)
        self._running.clear()
        self._batches.clear()
        self._closed.clear()
        self._beside = False

    def _passes(self, shard: ShardWork, loss: LossFunction) -> None:
        for batch in self.shard(shard):
            before = _generators() if self._beside else None
            with self.precision.autocast():
                value = loss(self.model, batch)
            check_loss(value)
            # A pass that has drawn may draw once more in its backward pass, from generators that all threads share.
            if before is not None and _same(before, _generators()) and not _runs_python(value):
                self._start_backward(value)
            else:
                self._add_batches()
                self.backward(value)

    # Backward passes on threads.

    def _start_backward(self, loss: Loss) -> None:
        self._enter(loss)
        self._sent = self._left == 0
        if len(self._running) == self._threads:
            wait([self._running.popleft()])  # each holds the activations of its pass
        start, entry = self._scale(loss.total.dtype), gradients.ledger_entry(loss, self._work.size)
        running = self._pool.submit(gradients.of_leaves, loss.total, start, self.parameters)
        self._running.append(running)
        self._batches.append(lambda: [*running.result(), entry])

    def _add_batches(self) -> None:
        """Add what threads have computed of the open shard to `.grad`: the batch that comes next is added behind it."""
        batches, self._batches = self._batches, []
        for batch in batches:
            summed = self._adding([parameter.grad for parameter in self.tracked], batch())
            for parameter, gradient in zip(self.tracked, summed, strict=True):
                parameter.grad = gradient

    def _close_shard(self, work: ShardWork) -> None:
        if any(parameter.grad is not None for parameter in self.tracked):
            self._add_batches()
        batches, self._batches = self._batches or [partial(list, self._take())], []
        self._closed.append(((work.index, work.index + 1), batches))
        while len(self._closed) > (self._threads if self._beside else 0):
            self._add_shard()

    def _add_shard(self) -> None:
        node, (first, *later) = self._closed.popleft()
        self._tree.add(node, reduce(self._adding, (batch() for batch in later), first()))

    def _finish_combination(self) -> None:
        while self._closed:
            self._add_shard()
        super()._finish_combination()

    # Shards on other devices.

    @contextmanager
    def _on(self, where: _Device) -> Iterator[None]:
        """Have this replica work with the weights of another device."""
        mine = self.parameters, self.ledger, self.auxiliary
        self.parameters, self.ledger = where.parameters, where.ledger
        self.auxiliary = mine[2].over(where.parameters)
        self.tracked, self._here = [*self.parameters, self.ledger], where.device
        try:
            yield
            mine[2].names = self.auxiliary.names
        finally:
            self.parameters, self.ledger, self.auxiliary = mine
            self.tracked, self._here = [*self.parameters, self.ledger], self.world.device

    def _placed(self, batch: Any) -> Any:
        return to_device(batch, self._here, non_blocking=self._here.type == "cuda")

    def _scale(self, dtype: torch.dtype) -> Tensor:
        return super()._scale(dtype).to(self._here)

    def _take(self) -> Gradients:
        home = self.world.device
        return [None if one is None else one.to(home) for one in super()._take()]

    def _check_master(self) -> None:
        """Refuse a pass that came to the master's own weights: their gradients would be lost."""
        for name, parameter in self.model.named_parameters():
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
        self.ledger = nn.Parameter(torch.zeros(2, device=device))
        self._held: dict[str, Tensor] = {}

    def refresh(self, model: nn.Module) -> Writes:
        """Copy what the master has; returns what watches the weights here."""
        self._held, self.parameters, self.ledger.grad = {}, [], None
        for name, theirs in model.named_parameters():
            mine = nn.Parameter(theirs.detach().to(self.device, copy=True), theirs.requires_grad)
            share(theirs, mine)
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
        and not any(parameter._backward_hooks for parameter in model.parameters())
        and all(
            type(module).__module__.startswith("torch.nn.")
            and "forward" not in vars(module)
            and not any(vars(module)[table] for table in HOOKS)
            and getattr(module, "max_norm", None) is None
            for module in model.modules()
        )
    )


def _runs_python(loss: Loss) -> bool:
    """Return whether the backward pass of a loss runs a function written in Python, or is one of several."""
    if loss.auxiliary:
        return True
    seen: set[Any] = set()
    waiting = [loss.total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction):
            return True
        seen.add(node)
        waiting += [one for one, _ in node.next_functions]
    return False


def _generators() -> tuple[Any, ...]:
    states = [torch.get_rng_state()]
    numpy_state = np.random.get_state(legacy=False)
    return states, numpy_state["state"], random.getstate()


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return (
        all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
        and before[1]["pos"] == after[1]["pos"]
        and np.array_equal(before[1]["key"], after[1]["key"])
        and before[2] == after[2]
    )

"""One process, one thread a replica, a master that gathers: limited by the interpreter's lock, by design.

Replicas on the master's device share its weights, so nothing is copied there; replicas on other devices get a copy
before each step. Each shard's gradients are summed along the canonical tree, so the answer is that of one process.
(torch's own DataParallel splits a batch inside forward, and adds gradients in an order of its own.)
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data import owned_shards, to_device
from paceline.errors import InputError
from paceline.strategies.auxiliary import Auxiliary
from paceline.strategies.base import Exactness, LossFunction, OpenReplica, Parts, ShardWork, StepWork
from paceline.strategies.gradients import ledger_entry, run_backward
from paceline.strategies.hooks import share
from paceline.strategies.result import StepResult
from paceline.strategies.sequential import SequentialReplica, check_loss
from paceline.strategies.tree import Gradients, TreeSum
from paceline.strategies.tuning import Tuning
from paceline.strategies.writes import Writes
from paceline.world import World, seeds
from paceline.world.points import FORWARD, reach


class DataParallel:
    """Threads over replicas, on the CPU or on several GPUs of one machine."""

    name = "dp"
    exactness = Exactness.BITWISE
    threaded = True

    def level(self, tuning: Tuning) -> Exactness:  # noqa: ARG002
        """Give its own level: no tuning changes it."""
        return self.exactness

    def prepare(self, parts: Parts, world: World) -> OpenReplica:
        """Make one replica a thread."""
        if world.size > 1:
            raise InputError(f"--strategy dp is one process, but this is one of {world.size}. Use ddp.")
        if parts.sync_batchnorm:
            raise InputError(
                "--sync-batchnorm needs workers that can exchange sums in mid-pass: use --strategy ddp."
            )
        return ThreadedReplica(parts, world)


def _copied(master: nn.Module) -> nn.Module:
    """Return a copy; a tensor that a module computes before each pass (the weight of the old weight_norm) goes along as it is."""
    computed = {
        id(value): value.detach()
        for module in master.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and value.grad_fn is not None
    }
    return copy.deepcopy(master, computed)


class _Copy:
    """One thread's model, with gradients of its own."""

    def __init__(self, master: nn.Module, device: torch.device) -> None:
        self.device = device
        try:
            self.model = _copied(master).to(device)
        except (RuntimeError, TypeError) as error:
            raise InputError(
                f"dp gives each thread a copy of the model, and this one cannot be copied: {str(error).split(chr(46))[0]:.90}. "
                "Use ddp."
            ) from error
        self.shares = device == next(master.parameters()).device
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.auxiliary = Auxiliary(self.parameters)
        self.writes = Writes(self.model.named_parameters())
        self.entry: Tensor | None = None

    def refresh(self, master: nn.Module) -> None:
        """Start a step with the master's weights and buffers."""
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), master.parameters(), strict=True):
                if self.shares:
                    mine.data = theirs.data
                else:
                    mine.copy_(theirs, non_blocking=True)
            for copied, original in zip(self.model.buffers(), master.buffers(), strict=True):
                copied.copy_(original, non_blocking=True)
        share(master, self.model)
        self.writes.begin()

    def check(self, master: nn.Module) -> None:
        """Refuse what a loss changed on the copy that it was given: it would be gone with the next step."""
        for (name, mine), theirs in zip(self.model.named_parameters(), master.parameters(), strict=True):
            if mine.requires_grad != theirs.requires_grad:
                raise InputError(
                    f"loss() changed requires_grad of {name} in the middle of a step. Change what trains between two steps."
                )

    def take(self) -> Gradients:
        """Give the gradients gathered since the last call, and the ledger's entry behind them."""
        taken: Gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        taken.append(self.entry)
        self.entry = None
        return taken + self.auxiliary.take()


class ThreadedReplica(SequentialReplica):
    """Deals the shards of a step over threads; a loop of the user's own gets them in turn."""

    adapts = True
    holds_unsaved = True

    def __init__(self, parts: Parts, world: World) -> None:
        super().__init__(parts, world)
        # torch.compile is not safe to call from several threads at once, so copies run eagerly.
        self._copies = [_Copy(self.model, device) for device in _devices(world.device, parts.threads)]
        self._parallel = len(self._copies) > 1
        self._pool = ThreadPoolExecutor(len(self._copies), thread_name_prefix="paceline-dp")
        # Generators belong to the whole process. A model that draws has its shards take turns, each with streams of its
        # own, the backward pass included (recomputed activations draw again). The first step is taken in turns to see.
        self._turn: threading.Lock | None = threading.Lock()
        self._draws = False

    def _rewire(self) -> None:
        """Make the copies anew: gradients of what trains now are wanted from them."""
        super()._rewire()
        self._copies = [_Copy(self.model, copy_.device) for copy_ in self._copies]

    def step(self, work: StepWork, loss: LossFunction, clip: float | None) -> StepResult:
        """Compute all shards on the threads, gather, and update the master."""
        self.begin(work)
        watched = None if self._turn is not None else _generators()
        nodes = self._compute(work, loss)
        if watched is not None and not _same(watched, _generators()):
            # It began to draw random numbers just now: what the threads drew in parallel is worth nothing.
            self._turn, self._draws, self.totals = threading.Lock(), True, []
            nodes = self._compute(work, loss)
        elif not self._draws:
            self._turn = None
        self._sent = True
        for node, gradients in nodes:
            self._tree.add(node, [None if one is None else one.to(self.world.device) for one in gradients])
        for copy_ in self._copies:
            copy_.check(self.model)
        # A thread without a sample has seen no names.
        self.auxiliary.names = max((copy_.auxiliary.names for copy_ in self._copies), key=len)
        return self.apply(clip)

    def _compute(self, work: StepWork, loss: LossFunction) -> list[Any]:
        threads = len(self._copies)
        shares = [work.shards[owned.start : owned.stop] for owned in _deal(threads, len(work.shards))]
        pairs = zip(self._copies, shares, strict=False)
        running = [self._pool.submit(self._share, copy_, share, loss) for copy_, share in pairs]
        return [node for future in running for node in future.result()]

    def _share(self, replica: _Copy, shards: Sequence[ShardWork], loss: LossFunction) -> list[Any]:
        """Compute one thread's shards; gives the sums of the subtrees that they make up."""
        replica.refresh(self.model)
        for copied, original in zip(replica.model.modules(), self.model.modules(), strict=True):
            copied.training = original.training
        tree = TreeSum(self._shards, self._adding)
        for shard in shards:
            versions = self.buffers.open_shard(replica.model) if shard.batches else {}
            with self._turn or contextlib.nullcontext():
                if self._turn is not None:
                    seeds.seed_everything(shard.seed)
                for batch in shard.batches:
                    reach(FORWARD)
                    self.world.pulse.batch()
                    before = None if self._turn is None or self._draws else _generators()
                    value = self._forward(replica, batch, loss)
                    self._draws = self._draws or (before is not None and not _same(before, _generators()))
                    self._backward(replica, shard, value)
            if shard.batches:
                self.buffers.close_shard(shard.index, replica.model, versions)
            tree.add((shard.index, shard.index + 1), replica.take())
        # A copy alone writes to the master's memory, as one process would, but what is given other memory is lost.
        replica.writes.check(self._work.number, counted=self._parallel)
        return tree.nodes

    def _forward(self, replica: _Copy, batch: Any, loss: LossFunction) -> Any:
        with self.precision.autocast():
            value = loss(replica.model, to_device(batch, replica.device))
        check_loss(value)
        return value

    def _backward(self, replica: _Copy, shard: ShardWork, loss: Any) -> None:
        self.totals += [(shard.index, part.total.detach()) for part in (loss, *loss.auxiliary.values())]
        if loss.auxiliary:
            replica.auxiliary.backward(
                loss.auxiliary, lambda dtype: self._scale(dtype).to(replica.device), self._work.size
            )
        run_backward([loss.total], [self._scale(loss.total.dtype).to(replica.device)])
        entry = ledger_entry(loss, self._work.size)
        replica.entry = entry if replica.entry is None else replica.entry + entry


def _devices(first: torch.device, threads: int) -> list[torch.device]:
    """Give a device to each thread: the GPUs in turn, or the one device there is."""
    if first.type != "cuda":
        return [first] * threads
    count = torch.cuda.device_count()
    return [torch.device("cuda", (first.index + thread) % count) for thread in range(threads)]


def _deal(threads: int, shards: int) -> list[range]:
    hands = min(threads, shards)
    return [owned_shards(thread, hands, shards) for thread in range(hands)]


def _generators() -> tuple[Any, ...]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    numpy_state = np.random.get_state(legacy=False)
    return states, numpy_state["state"], random.getstate()


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return (
        all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
        and before[1]["pos"] == after[1]["pos"]
        and np.array_equal(before[1]["key"], after[1]["key"])
        and before[2] == after[2]
    )

"""One process, one thread a replica, a master that gathers: limited by the interpreter's lock, by design.

Replicas on the master's device share its weights, so nothing is copied there; replicas on other devices get a copy
before each step. Each shard's gradients are summed along the canonical tree, so the answer is that of one process.
(torch's own DataParallel splits a batch inside forward, and adds gradients in an order of its own.)
"""

from __future__ import annotations

import random
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
from paceline.strategies.model_copy import Contents, ModelCopy
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


class _Copy:
    """One thread's model, with gradients of its own."""

    def __init__(self, master: nn.Module, device: torch.device) -> None:
        self.device = device
        try:
            self.twin = ModelCopy(master)
            self.model = self.twin.model.to(device)
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
        # Generators, and what the copies share beside weights, belong to the whole process. Where passes draw or write to
        # that, the shards are taken in their order, as one process takes them. The first step is, to see.
        self._in_order = True
        self._first = True

    def _rewire(self) -> None:
        """Make the copies anew: gradients of what trains now are wanted from them."""
        super()._rewire()
        self._copy_anew()

    def _copy_anew(self) -> None:
        self._copies = [_Copy(self.model, copy_.device) for copy_ in self._copies]

    def step(self, work: StepWork, loss: LossFunction, clip: float | None) -> StepResult:
        """Compute all shards on the threads, gather, and update the master."""
        self.begin(work)
        if self._copies[0].twin.changed() is not None:
            self._copy_anew()
        held = Contents(self._copies[0].twin.shared)
        nodes = None if self._in_order else self._in_parallel(work, loss, held)
        if nodes is None:
            self._in_order, self.totals = not self._first, []
            nodes = [node for pair in self._dealt(work) for node in self._alone(*pair, loss)]
            self._in_order = self._in_order or not held.same()
            self._first = False
        self._sent = True
        for node, gradients in nodes:
            self._tree.add(node, [None if one is None else one.to(self.world.device) for one in gradients])
        for copy_ in self._copies:
            copy_.check(self.model)
        self._check_master()
        # A thread without a sample has seen no names.
        self.auxiliary.names = max((copy_.auxiliary.names for copy_ in self._copies), key=len)
        return self.apply(clip)

    def _dealt(self, work: StepWork) -> list[tuple[_Copy, Sequence[ShardWork]]]:
        threads = len(self._copies)
        shares = [work.shards[owned.start : owned.stop] for owned in _deal(threads, len(work.shards))]
        return list(zip(self._copies, shares, strict=False))

    def _in_parallel(self, work: StepWork, loss: LossFunction, held: Contents) -> list[Any] | None:
        """Compute all shards at once; None where that is worth nothing, because the passes draw or write to what is shared."""
        watched, dealt = _generators(), self._dealt(work)
        for copy_, _ in dealt:
            copy_.twin.give()
        running = [self._pool.submit(self._share, copy_, share, loss) for copy_, share in dealt]
        nodes = [node for future in running for node in future.result()]
        if not (held.same() and _same(watched, _generators())) or any(copy_.twin.wrote for copy_, _ in dealt):
            held.put_back()
            return None
        for copy_, _ in dealt:
            copy_.twin.take()
        return nodes

    def _alone(self, replica: _Copy, shards: Sequence[ShardWork], loss: LossFunction) -> list[Any]:
        """Compute one thread's shards while no other computes."""
        replica.twin.give()
        nodes = self._pool.submit(self._share, replica, shards, loss, seeded=True).result()
        self._in_order = self._in_order or replica.twin.wrote
        replica.twin.take()
        return nodes

    def _check_master(self) -> None:
        """Refuse a pass that came to the master's own weights: their gradients would be lost."""
        if any(parameter.grad is not None for parameter in self.parameters):
            name = next(name for name, one in self.model.named_parameters() if one.grad is not None)
            raise InputError(
                f"dp gives each thread a copy of the model, and its forward pass or loss came to {name} of the original, by a "
                "function, a weak reference or a model that the task keeps. Reach weights through the module's self and the "
                "model that loss() is given, or use ddp."
            )

    def _share(
        self, replica: _Copy, shards: Sequence[ShardWork], loss: LossFunction, *, seeded: bool = False
    ) -> list[Any]:
        """Compute one thread's shards; gives the sums of the subtrees that they make up."""
        replica.refresh(self.model)
        tree = TreeSum(self._shards, self._adding)
        for shard in shards:
            versions = self.buffers.open_shard(replica.model) if shard.batches else {}
            if seeded:
                seeds.seed_everything(shard.seed)
            for batch in shard.batches:
                reach(FORWARD)
                self.world.pulse.batch()
                before = None if not seeded or self._in_order else _generators()
                value = self._forward(replica, batch, loss)
                self._in_order = self._in_order or (before is not None and not _same(before, _generators()))
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

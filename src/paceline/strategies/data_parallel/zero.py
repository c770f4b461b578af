"""Optimizer state dealt out among the workers of ddp: `--shard-optimizer`, known as ZeRO-1.

Every worker has the whole model and the summed gradients, but updates only the parameters that were dealt to it, with the
task's own optimizer: the others' gradients are taken away before its step, and every optimizer passes over a
parameter without one. Then everybody gets the updated parameters from their owners. Whole parameters are dealt, so any
optimizer computes what it would alone, and the bits are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.state.chunks import (
    MODEL,
    Catalogue,
    ChunkBounds,
    LocalState,
    Read,
    read_whole,
    split,
)
from paceline.strategies.base import StrategyInputs
from paceline.strategies.buffers.unsaved import note_unsaved
from paceline.strategies.guards.guarded_state import guard_state, kept_elsewhere
from paceline.strategies.guards.partial_update import Scope
from paceline.strategies.guards.trained import check_equal
from paceline.strategies.in_turns.optimizers import each_of
from paceline.strategies.placement import Optimize, Placement, load_whole_state, whole_state
from paceline.strategies.result import StepResult
from paceline.strategies.sharded import deal
from paceline.world import World

BUCKET = 4 << 20
"""Bytes of parameters that travel together; a larger one travels alone, without a copy."""


class DealtPlacement(Placement):
    """The whole model, with the optimizer state of this worker's part of the parameters."""

    holds_unsaved = True
    scope = Scope.PARAMETERS
    compares_options = True

    def __init__(self, inputs: StrategyInputs, world: World, *, equal: bool) -> None:
        """`equal` promises the same bits on all workers."""
        self.model = inputs.model.to(world.device)
        note_unsaved(self.model)
        self._world, self._equal = world, equal
        self._remains: LocalState | None = None
        """What this worker held when its group broke."""
        self._torn = False
        """Whether parameters were updated that have not reached everybody."""
        self._checked = False

    def adopt(self, optimizer: Optimizer) -> None:
        """Deal the optimizer's parameters out."""
        super().adopt(optimizer)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        # In the model's order, which is the same on all workers: that of a group may come from a set.
        dealt = [one for one in self.model.parameters() if one.requires_grad and id(one) in held]
        sizes = [parameter.numel() * parameter.element_size() for parameter in dealt]
        owners = deal(sizes, self._world.size)
        self._others = [
            parameter for parameter, owner in zip(dealt, owners, strict=True) if owner != self._world.rank
        ]
        others = {id(parameter) for parameter in self._others}
        self._absent = {id(one): name for name, one in self.model.named_parameters() if id(one) in others}
        self._strange = set(self._absent.values())
        self._rounds = _rounds(dealt, owners, self._world.size)
        self._release()
        self.refresh()

    def refresh(self) -> None:
        """Have the optimizer say whose state is not here, in what loading replaces."""
        guard_state(
            each_of(self.optimizer), self._absent, kept_elsewhere("under --shard-optimizer another worker")
        )

    def _release(self) -> None:
        """Drop state that others keep: of a group before, or made by the optimizer before its first step."""
        for parameter in self._others:
            self.optimizer.state.pop(parameter, None)

    def update(self, optimize: Optimize, result: StepResult) -> None:  # noqa: ARG002
        """Update this worker's parameters, then have everybody's."""
        for parameter in self._others:
            parameter.grad = None
        self._torn = True
        optimize()
        self._share()
        self._torn = False
        if not self._checked:
            self._check_slots()

    @contextmanager
    def substituted(self, swap: Callable[[], None]) -> Iterator[None]:
        """Compute with what each owner puts in the place of its parameters."""
        kept = [one.detach().clone() for one in self._others]
        swap()
        try:
            self._torn = True  # a message in flight may arrive behind what is put back
            self._share()
            self._torn = False
            yield
        finally:
            swap()
            with torch.no_grad():
                for one, values in zip(self._others, kept, strict=True):
                    one.copy_(values)

    @torch.no_grad()
    def _share(self) -> None:
        """Bring each updated parameter from its owner to all others; a round has one message from each."""
        for messages in self._rounds:
            running = []
            for owner, members in messages:
                alone = len(members) == 1 and members[0].is_contiguous()
                flat = (
                    members[0].detach() if alone else torch.cat([one.detach().reshape(-1) for one in members])
                )
                work = dist.broadcast(flat, group_src=owner, group=self._world.comm.group, async_op=True)
                running.append((work, owner, None if alone else flat, members))
            for work, owner, copied, members in running:
                if work is not None:
                    work.wait()
                if copied is not None and owner != self._world.rank:
                    for one, values in zip(
                        members, torch.split(copied, [one.numel() for one in members]), strict=True
                    ):
                        one.copy_(values.view(one.shape))

    def _check_slots(self) -> None:
        """Refuse an optimizer whose state cannot be gathered again."""
        self._checked = bool(self.optimizer.state)
        for parameter, slots in self.optimizer.state.items():
            for slot, value in slots.items():
                if not isinstance(value, Tensor):
                    raise InputError(
                        f"--shard-optimizer deals out tensors, but {type(self.optimizer).__name__} keeps {slot} = {value!r:.40} "
                        f"for a parameter of shape {tuple(parameter.shape)}. Leave --shard-optimizer out."
                    )

    def synchronize(self) -> None:
        """Refuse to save or report weights in which the workers have parted, however that came about."""
        if self._equal:
            check_equal([*self.model.named_parameters(), *self.model.named_buffers()], self._world)

    def abandon(self) -> None:
        """Release the group, but not what this worker holds.

        Where the group broke in the middle of an update some parameters are a step ahead of others: nobody may go on from
        those, so this worker then holds nothing.
        """
        if self._remains is None:
            held = self.local_state()
            self._remains = LocalState({}, held.extra_state) if self._torn else held

    def local_state(self) -> LocalState:
        """Return the whole model and this worker's part of the optimizer state."""
        if self._remains is not None:
            return self._remains
        held = split(whole_state(self.model, self.optimizer))
        return replace(held, answers_for=held.answers_for - self._strange)

    def wanted(self, catalogue: Catalogue) -> dict[str, ChunkBounds]:
        """Return the whole model, and of the optimizer's slots this worker's."""
        return {
            key: bounds
            for key, bounds in super().wanted(catalogue).items()
            if key.startswith(f"{MODEL}/") or key.partition("/")[2].rpartition("/")[0] not in self._strange
        }

    def load_local_state(self, catalogue: Catalogue, read: Read, extra_state: Mapping[str, Any]) -> None:
        """Read the model, and of the optimizer's slots only this worker's."""
        state = read_whole(
            catalogue, read, extra_state, lambda room, name: room == MODEL or name not in self._strange
        )
        load_whole_state(self.model, self.optimizer, state)
        self._release()


Message = tuple[int, list[nn.Parameter]]


def _rounds(dealt: Sequence[nn.Parameter], owners: Sequence[int], workers: int) -> list[list[Message]]:
    """Put each owner's parameters together into messages, and one message of each owner into a round."""
    queues: list[list[Message]] = [[] for _ in range(workers)]
    for rank, queue in enumerate(queues):
        room = 0
        for parameter, owner in zip(dealt, owners, strict=True):
            if owner != rank:
                continue
            size = parameter.numel() * parameter.element_size()
            if not queue or room + size > BUCKET or queue[-1][1][0].dtype != parameter.dtype:
                queue.append((rank, []))
                room = 0
            queue[-1][1].append(parameter)
            room += size
    longest = max(len(queue) for queue in queues)
    return [[queue[place] for queue in queues if place < len(queue)] for place in range(longest)]

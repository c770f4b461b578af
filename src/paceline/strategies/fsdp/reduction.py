"""Takes gradients to the workers that hold their rows, and workers without a batch through the passes of the others.

Within a step gradients add up in each worker's own memory, as they do in one process; only its last pass sends them out,
together with the shards that were finished before, wrap by wrap while the pass goes on. Every row is added along the
canonical tree by the worker that holds it. Below the level bitwise every pass ends with torch's own reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.compat import foreach, process_groups
from paceline.compat.fsdp import Member
from paceline.reduce.combination import Combination
from paceline.reduce.gather import open_gather
from paceline.reduce.norms import total_norm
from paceline.reduce.shared_memory_scatter import open_scatter
from paceline.reduce.tree import TreeSum
from paceline.strategies.fsdp.param_groups import ParamGroup
from paceline.strategies.fsdp.rounds import END, RoundProgress, Rounds
from paceline.world import World
from paceline.world.fault_points import REDUCTION, hit
from paceline.world.status_page import Phase

Value = TypeVar("Value")
_COMMUNICATION = Phase.COMMUNICATION


class Reduction:
    """The messages of a sharded model's passes."""

    def __init__(
        self, data: World, place: World, copies: World, shards: int, *, exact: bool, transport: str
    ) -> None:
        """`data` is everybody data is dealt to, `place` those who share a model, `copies` those with the same rows."""
        self._data, self._place, self._copies = data, place, copies
        self._exact = exact
        self.gather = open_gather(place, transport)
        self.scatter = open_scatter(data, copies, shards, transport)
        self.wraps: list[ParamGroup] = []
        self.trained: list[Member] = []
        """The parameters that train, in the model's order."""
        self.blocks: list[str] = []
        """The names of the blocks that are gathered for their own forward pass only."""
        self._parameters: list[list[nn.Parameter]] = []
        self._round = RoundProgress(data, Rounds(data.rank, [0]))
        self._combination: Combination | None = None
        self._outputs: dict[int, Tensor] = {}

    def attach(
        self, wraps: list[ParamGroup], places: list[list[int]], parameters: Sequence[nn.Parameter]
    ) -> None:
        """Know the wraps, where each one's parameters stand in the model's order, and the rows held of all of them."""
        self.wraps, self.places = wraps, places
        self._parameters = [[parameters[place] for place in inside] for inside in places]
        self._types = [one.dtype for one in parameters]
        self.gather.reserve(max(wrap.length for wrap in wraps))
        self.scatter.reserve(max(wrap.chunk * wrap.workers * wrap.type.itemsize for wrap in wraps))
        placed = {
            place: member
            for wrap, inside in zip(wraps, places, strict=True)
            for place, member in zip(inside, wrap.trained, strict=True)
        }
        self.trained = [placed[place] for place in sorted(placed)]
        self.blocks = [wrap.name for wrap in wraps if wrap.name]

    # The passes of a step.

    def begin(self, rounds: Rounds, *, looks: bool = False) -> None:
        """Start the rounds of a step; `looks` compares the values of gathered weights behind each pass."""
        self._round = RoundProgress(self._data, rounds)
        for wrap in self.wraps:
            wrap.looks = looks
            wrap.open()

    @property
    def ends(self) -> bool:
        """Whether the gradients of this pass leave with it."""
        return self._round.left == 1 or not self._exact

    @property
    def over(self) -> bool:
        """Whether all rounds of the step are done."""
        return self._round.left <= 0

    def arm(self, combination: Combination | None, *, reduces: bool) -> None:
        """Prepare for the backward pass; `combination` says what this worker's sums are made of, if it is the last."""
        self._combination = combination
        for wrap in self.wraps:
            wrap.arm(reduces=reduces)

    def finish_reductions(self) -> None:
        """Complete the reductions of a pass and take the rows that came of them."""
        for wrap in self.wraps:
            wrap.finish_reductions()
        # Before anything is waited for: those who follow wait for their rows only when they know that no more come.
        self._round.announce(END)
        self._collect()
        for wrap in self.wraps:
            wrap.disarm()

    def _collect(self) -> None:
        self.scatter.finish()
        for index, output in self._outputs.items():
            wrap = self.wraps[index]
            for member, parameter, rows in zip(
                wrap.trained, self._parameters[index], wrap.split(output), strict=True
            ):
                member.sharded.grad = None
                mine = rows.to(parameter.device)
                parameter.grad = mine if parameter.grad is None else parameter.grad.add_(mine)
        self._outputs = {}

    def open_root(self) -> None:
        """Gather what belongs to no block before a pass: a loss may use it, or methods of the model, outside of its forward."""
        for wrap in self.wraps:
            if not wrap.name:
                wrap.gather()

    def check_slots(self) -> None:
        """Raise where other tensors were put in the place of weights: they are neither trained nor saved."""
        for wrap in self.wraps:
            wrap.check_slots(memory=False)
            wrap.check_slots(memory=True)

    def check_passes(self, when: str) -> None:
        """Raise if a pass has written to a gathered parameter, or told it to train: the next gathering undoes it."""
        for wrap in self.wraps:
            wrap.check(when)

    def end_forward(self) -> None:
        """Close a pass that has no way back."""
        self._round.announce(END)
        self.end_pass()

    def end_pass(self) -> None:
        """Close a pass."""
        for wrap in self.wraps:
            wrap.close()
        self._round.next()
        for wrap in self.wraps:
            wrap.open()

    def follow(self, combination: Combination | None) -> None:
        """Go through a pass of the others without a batch of one's own."""
        self._combination = combination
        while (message := self._round.listen()) != END:
            index, reduces = divmod(message, 2)
            wrap = self.wraps[index]
            if reduces:
                output = torch.empty(wrap.chunk, dtype=wrap.type, device=self._data.device)
                self._reduce(wrap, None, output)
            else:
                wrap.join_gather()
        self._collect()
        self._round.next()

    def abandon(self) -> None:
        """Let go of the group, and of memory that is shared in it; nothing is gathered or reduced after this."""
        self.gather = self.scatter = self._combination = None  # type: ignore[assignment]
        self._outputs = {}
        for wrap in self.wraps:
            wrap.abandon()

    # What torch's wraps ask for.

    def outlive(self, action: Callable[[], Value], otherwise: Callable[[], Value]) -> Value:
        """Return what a message of a pass came to, or something else in its place where its step is discarded."""
        before = self._place.pulse.enter(_COMMUNICATION)
        made: Value = self._place.interruption.outlive(action, otherwise)
        self._place.pulse.enter(before)
        return made

    def gathers(self, wrap: ParamGroup) -> None:
        """Know that the weights of a wrap are about to be gathered."""
        self._round.announce(2 * wrap.index)

    def reduces(self, wrap: ParamGroup, gradients: Tensor, output: Tensor) -> None:
        """Add a wrap's gradients up over all workers; `output` gets this worker's rows."""
        self._round.announce(2 * wrap.index + 1)
        self._reduce(wrap, gradients, output)

    def room(self, wrap: ParamGroup) -> Tensor:
        """Return memory in which a wrap's gradients are laid out for `reduces`."""
        count = wrap.chunk * wrap.workers
        if self._combination is None:
            return torch.empty(count, dtype=wrap.type, device=wrap.device)
        place = next(place for place, (_, live) in enumerate(self._combination.nodes) if live)
        return self.scatter.room(place, count, wrap.type, wrap.device)

    def _reduce(self, wrap: ParamGroup, live: Tensor | None, output: Tensor) -> None:
        hit(REDUCTION)
        self._outputs[wrap.index] = output
        if self._combination is None:
            self._reduce_plainly(wrap, live, output)
            return
        inside = self.places[wrap.index]
        for completed in self._combination.into_live:
            if live is not None:
                live += wrap.flat([completed[place] for place in inside])
        sums = []
        for held, is_live in self._combination.nodes:
            if is_live and live is not None:
                sums.append(live)
            else:
                sums.append(wrap.flat([None if held is None else held[place] for place in inside]))
        self.scatter.start(sums, output)

    def _reduce_plainly(self, wrap: ParamGroup, live: Tensor | None, output: Tensor) -> None:
        mine = wrap.flat([None] * len(wrap.trained)) if live is None else live
        process_groups.reduce_scatter_single(output, mine, op=dist.ReduceOp.SUM, group=self._place.comm.group)
        if self._copies.size > 1:
            self._copies.comm.all_reduce_(output).wait()

    # At the end of a step.

    def scatter_terms(self, tree: TreeSum, start: int) -> list[Tensor]:
        """Add up whole gradients that lie in the tree's lists from `start` on, and give this worker's rows of them."""
        found: list[Tensor | None] = [None] * sum(len(inside) for inside in self.places)
        for wrap, inside in zip(self.wraps, self.places, strict=True):
            if not inside:
                continue
            output = torch.empty(wrap.chunk, dtype=wrap.type, device=self._data.device)
            sums = [
                wrap.flat([held[start + place] if len(held) > start else None for place in inside])
                for _, held in tree.nodes
            ]
            self.scatter.start(sums, output)
            self.scatter.finish()
            for place, rows in zip(inside, wrap.split(output), strict=True):
                found[place] = rows
        return [rows for rows in found if rows is not None]

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient: to the bit where that is promised."""
        found: dict[int, Tensor] = {}
        for wrap, inside, parameters in zip(self.wraps, self.places, self._parameters, strict=True):
            if not inside:
                continue
            rows = [parameter.grad for parameter in parameters]
            norms = zip(inside, self._norms(wrap, rows), strict=True)
            found |= {place: norm for place, norm in norms if norm is not None}
        places = sorted(found)
        # In 64 bits no norm is rounded, whatever the type of its parameter.
        ordered = torch.stack([found[place].double() for place in places])
        total = total_norm(ordered, [self._types[place] for place in places])
        return total if self._exact else self._place.comm.all_reduce(total.square()).sqrt()

    def _norms(self, wrap: ParamGroup, rows: list[Tensor | None]) -> list[Tensor | None]:
        """Return each gradient's norm: of all its rows, gathered for a moment, or of the rows held here."""
        if not self._exact:
            return [None if one is None else torch.linalg.vector_norm(one) for one in rows]
        mine = torch.zeros(wrap.chunk, dtype=wrap.type, device=self._data.device)
        for place, one in zip(wrap.split(mine), rows, strict=True):
            if one is not None:
                place.copy_(one)
        whole = wrap.whole(torch.stack(self._place.comm.all_gather(mine)))
        # As `gradients.finish` does it in one process: fresh copies all lie alike in a GPU's memory.
        placed = [one.clone() for one in whole] if mine.is_cuda else whole
        return [None if one is None else norm for one, norm in zip(rows, foreach.norm(placed), strict=True)]

"""Takes gradients to the workers that hold their rows, and workers without a batch through the passes of the others.

Within a step gradients add up in each worker's own memory, as they do in one process; only its last pass sends them out,
together with the shards that were finished before, one parameter group after another while the pass goes on. Every row is
added along the canonical tree by the worker that holds it. Below the level bitwise every pass ends with torch's own reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.compat import process_groups
from paceline.compat.fsdp import GroupedParam
from paceline.errors import InputError
from paceline.reduce.combination import Combination
from paceline.reduce.gather import Wait, open_gather
from paceline.reduce.norms import norms, placed_norms, total_norm
from paceline.reduce.shared_memory_scatter import open_scatter
from paceline.reduce.tree import TreeSum
from paceline.strategies.fsdp.param_groups import ParamGroup, whole_tensors
from paceline.strategies.fsdp.rounds import END, RoundProgress, Rounds
from paceline.strategies.sharded import deal
from paceline.world import World, spans
from paceline.world.fault_points import REDUCTION, hit
from paceline.world.status_page import Phase

Value = TypeVar("Value")
_COMMUNICATION = Phase.COMMUNICATION


class FsdpReduction:
    """The messages of a sharded model's passes."""

    def __init__(
        self, data: World, place: World, copies: World, shards: int, *, exact: bool, transport: str
    ) -> None:
        """`data` is everybody data is dealt to, `place` those who share a model, `copies` those with the same rows."""
        self._data, self._place, self._copies = data, place, copies
        self._exact = exact
        self.gather = open_gather(place, transport)
        self.scatter = open_scatter(data, copies, shards, transport)
        self.param_groups: list[ParamGroup] = []
        self.trained: list[GroupedParam] = []
        """The parameters that train, in the model's order."""
        self.blocks: list[str] = []
        """The names of the blocks that are gathered for their own forward pass only."""
        self._parameters: list[list[nn.Parameter]] = []
        self._round = RoundProgress(data, Rounds(data.rank, [0] * data.size))
        self._combination: Combination | None = None
        self._outputs: dict[int, Tensor] = {}
        self._between = True
        """Whether no step and no evaluation is under way: what is gathered then, the loop's own code asks for."""
        self._passed = False
        """Whether this round has had its backward pass."""

    def attach(
        self, param_groups: list[ParamGroup], places: list[list[int]], parameters: Sequence[nn.Parameter]
    ) -> None:
        """Know the parameter groups, where each one's parameters stand in the model's order, and the rows held of all of them."""
        self.param_groups, self.places = param_groups, places
        self._parameters = [[parameters[place] for place in inside] for inside in places]
        self._types = [one.dtype for one in parameters]
        self.gather.reserve(max(param_group.length for param_group in param_groups))
        self.scatter.reserve(max(one.chunk * one.workers * one.type.itemsize for one in param_groups))
        placed = {
            place: member
            for param_group, inside in zip(param_groups, places, strict=True)
            for place, member in zip(inside, param_group.trained, strict=True)
        }
        self.trained = [placed[place] for place in sorted(placed)]
        self.blocks = [param_group.name for param_group in param_groups if param_group.name]

    # The passes of a step.

    def enter(self) -> None:
        """Know that a step begins, or an evaluation of some shards, before workers ask each other about it."""
        self.gather.begin()
        self._between = False

    def begin(self, rounds: Rounds, *, looks: bool = False) -> None:
        """Start the rounds of a step; `looks` compares the values of gathered weights behind each pass."""
        self._round, self._passed = RoundProgress(self._data, rounds), False
        for param_group in self.param_groups:
            param_group.looks = looks
        self._close()

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
        for param_group in self.param_groups:
            param_group.arm(reduces=reduces)

    def finish_reductions(self) -> None:
        """Complete the reductions of a pass; the rows that come of them are taken at the end of its round."""
        for param_group in self.param_groups:
            param_group.finish_reductions()

    def disarm(self) -> None:
        """Know that passes are the loop's own until the next is prepared."""
        for param_group in self.param_groups:
            param_group.disarm()

    def _collect(self) -> None:
        self.scatter.finish()
        for index, output in self._outputs.items():
            param_group = self.param_groups[index]
            for member, parameter, rows in zip(
                param_group.trained, self._parameters[index], param_group.split(output), strict=True
            ):
                member.sharded.grad = None
                mine = rows.to(parameter.device)
                parameter.grad = mine if parameter.grad is None else parameter.grad.add_(mine)
        self._outputs = {}

    def open_root(self) -> None:
        """Gather what belongs to no block before a pass: a loss may use it, or methods of the model, outside of its forward."""
        self.end_round()
        for param_group in self.param_groups:
            param_group.keep(True)
            if not param_group.name:
                param_group.gather()

    def end(self) -> None:
        """Know that a step, or an evaluation of some shards, is over."""
        self._between = True

    def meets(self, name: str, what: int | None = None) -> bool:
        """Wait for the others where the loop's own code uses what has this name; return False in a step, where they may not come.

        Raise where they do something else.
        """
        what = crc32(name.encode()) % (1 << 20) if what is None else what
        if self._between and not self.gather.meets(what):
            raise InputError(
                f"this worker alone uses {name or 'the model'} between two steps, or others use something else there, and under "
                "fsdp all workers gather weights together. Call the model on all of them, where only rank 0 needs the outcome, "
                "too; measure with run.evaluate; or use --strategy ddp."
            )
        return self._between

    def check_slots(self) -> None:
        """Raise where other tensors were put in the place of weights: they are neither trained nor saved."""
        for param_group in self.param_groups:
            param_group.check_slots(memory=False)
            param_group.check_slots(memory=True)

    def check_passes(self, when: str) -> None:
        """Raise if a pass has written to a gathered parameter, or told it to train: the next gathering undoes it."""
        for param_group in self.param_groups:
            param_group.check(when)

    def end_forward(self) -> None:
        """Close a pass that has no way back."""
        self._passed = True
        self.end_round()

    def end_pass(self) -> None:
        """Close a backward pass; a loop may still call the model for the same batch, and those who follow hear of it."""
        self._passed = True
        self._close()

    def end_round(self) -> None:
        """Go on to the next round, if this one has had its pass."""
        if self._passed:
            self._passed = False
            self.outlive(self._end_round, lambda: None)

    def _end_round(self) -> None:
        # Before anything is waited for: those who follow wait for their rows only when they know that no more come.
        self._round.announce(END)
        self._collect()
        self._close()
        self._round.next()

    def _close(self) -> None:
        for param_group in self.param_groups:
            param_group.keep(False)
            param_group.close()

    def follow(self, combination: Combination | None) -> None:
        """Go through a pass of the others without a batch of one's own."""
        self._combination = combination
        while (message := self._round.listen()) != END:
            index, reduces = divmod(message, 2)
            param_group = self.param_groups[index]
            if reduces:
                output = torch.empty(param_group.chunk, dtype=param_group.type, device=self._data.device)
                self.reduces(param_group, None, output)
            else:
                param_group.join_gather()
        self._collect()
        self._round.next()

    def abandon(self) -> None:
        """Let go of the group, and of memory that is shared in it; nothing is gathered or reduced after this."""
        self.gather = self.scatter = self._combination = None  # type: ignore[assignment]
        self._outputs = {}
        for param_group in self.param_groups:
            param_group.abandon()

    # What torch's parameter groups ask for.

    def outlive(self, action: Callable[[], Value], otherwise: Callable[[], Value]) -> Value:
        """Return what a message of a pass came to, or something else in its place where its step is discarded."""
        before = self._place.status_page.enter(_COMMUNICATION)
        with spans.of[spans.WAITING]:
            made: Value = self._place.interruption.outlive(action, otherwise)
        self._place.status_page.enter(before)
        return made

    def gathers(
        self, param_group: ParamGroup, message: Tensor, rows: Tensor, group: dist.ProcessGroup, *, later: bool
    ) -> Wait | None:
        """Gather the weights of a parameter group; return what waits until they are here."""
        self.meets(param_group.name, param_group.index)
        self._round.announce(2 * param_group.index)
        return self.gather.start(message, rows, group, later=later)

    def room(self, param_group: ParamGroup) -> Tensor:
        """Return memory in which a parameter group's gradients are laid out for `reduces`."""
        count = param_group.chunk * param_group.workers
        if self._combination is None:
            return torch.empty(count, dtype=param_group.type, device=param_group.device)
        place = next(place for place, (_, live) in enumerate(self._combination.nodes) if live)
        return self.scatter.room(place, count, param_group.type, param_group.device)

    def reduces(self, param_group: ParamGroup, live: Tensor | None, output: Tensor) -> None:
        """Add a parameter group's gradients up over all workers; `output` gets this worker's rows.

        A worker that follows the others through their pass has none that are `live`, and announces nothing.
        """
        if live is not None:
            self._round.announce(2 * param_group.index + 1)
        hit(REDUCTION)
        self._outputs[param_group.index] = output
        if self._combination is None:
            self._reduce_plainly(param_group, live, output)
            return
        inside = self.places[param_group.index]
        for completed in self._combination.into_live:
            if live is not None:
                live += param_group.flat([completed[place] for place in inside])
        sums = []
        for held, is_live in self._combination.nodes:
            if is_live and live is not None:
                sums.append(live)
            else:
                sums.append(param_group.flat([None if held is None else held[place] for place in inside]))
        self.scatter.start(sums, output)

    def _reduce_plainly(self, param_group: ParamGroup, live: Tensor | None, output: Tensor) -> None:
        mine = param_group.flat([None] * len(param_group.trained)) if live is None else live
        process_groups.reduce_scatter_single(output, mine, op=dist.ReduceOp.SUM, group=self._place.comm.group)
        if self._copies.size > 1:
            self._copies.comm.all_reduce_(output).wait()

    # At the end of a step.

    def scatter_terms(self, tree: TreeSum, start: int) -> list[Tensor]:
        """Add up whole gradients that lie in the tree's lists from `start` on, and give this worker's rows of them."""
        found: list[Tensor | None] = [None] * sum(len(inside) for inside in self.places)
        for param_group, inside in zip(self.param_groups, self.places, strict=True):
            if not inside:
                continue
            output = torch.empty(param_group.chunk, dtype=param_group.type, device=self._data.device)
            sums = [
                param_group.flat([held[start + place] if len(held) > start else None for place in inside])
                for _, held in tree.nodes
            ]
            self.scatter.start(sums, output)
            self.scatter.finish()
            for place, rows in zip(inside, param_group.split(output), strict=True):
                found[place] = rows
        return [rows for rows in found if rows is not None]

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient: to the bit where that is promised."""
        held: dict[int, Tensor] = {}
        values = torch.zeros(len(self._types), dtype=torch.float64, device=self._data.device)
        for param_group, inside, parameters in zip(
            self.param_groups, self.places, self._parameters, strict=True
        ):
            rows = {place: one.grad for place, one in zip(inside, parameters, strict=True)}
            there = {place: one for place, one in rows.items() if one is not None}
            held |= there
            if self._exact and there:
                values += placed_norms(self._owned(param_group, inside, there), len(values), values.device)[0]
        places = sorted(held)  # the same on all workers
        types = [self._types[place] for place in places]
        if not self._exact:
            own = total_norm(norms([held[place] for place in places]), types)
            square: Tensor = self._place.comm.all_reduce(own.double().square())  # which may leave fewer bits
            return square.sqrt().to(own.dtype)
        every = self._place.comm.all_reduce(values).unbind(0)
        return total_norm([every[place] for place in places], types)

    def _owned(
        self, param_group: ParamGroup, inside: Sequence[int], rows: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return the whole gradients, by place, that this worker measures for all: everybody sends it its rows of them.

        A norm with the bits of one process needs all rows in one place, but not in every place.
        """
        place, size = self._place, self._place.size
        members = {
            one: member for one, member in zip(inside, param_group.trained, strict=True) if one in rows
        }
        owners = deal([member.padded_count for member in members.values()], size)
        owned: list[dict[int, GroupedParam]] = [{} for _ in range(size)]
        for owner, (one, member) in zip(owners, members.items(), strict=True):
            owned[(owner + param_group.index) % size][one] = member
        leaving = []
        for theirs in owned:
            counts = [member.padded_count for member in theirs.values()]
            sent = torch.zeros(sum(counts), dtype=param_group.type, device=self._data.device)
            for one, room in zip(theirs, torch.split(sent, counts), strict=True):
                room[: rows[one].numel()].copy_(rows[one].reshape(-1))
            leaving.append(sent)
        mine = owned[place.rank]
        came = place.comm.all_to_all(leaving, rows=[len(leaving[place.rank])] * size)
        return dict(zip(mine, whole_tensors(came, list(mine.values())), strict=True))

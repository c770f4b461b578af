"""A server that applies what trainers bring as it comes, and holds back those too far ahead: `--staleness s`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.strategies.base import StepWork, StrategyInputs
from paceline.strategies.parameter_server.push_queue import Push
from paceline.strategies.parameter_server.server import ServerReplica
from paceline.strategies.result import StepResult
from paceline.world import World
from paceline.world.fault_points import OPTIMIZER, hit


class AsyncServer(ServerReplica):
    """Serves each trainer for itself."""

    def __init__(self, parts: StrategyInputs, world: World) -> None:
        super().__init__(parts, world)
        self._counts = [0] * self._trainers
        """How many steps each trainer has pushed, in the numbers of the run; 0 before the first."""
        self._entries: dict[int, dict[int, Push]] = {}
        """The letters of each step that is not complete, by trainer."""
        self._latest: dict[int, Push] = {}
        self._unanswered: list[Push] = []
        self.updates = 0
        """How many updates were made: fewer than pushes where some were taken together."""

    def begin(self, work: StepWork) -> None:
        """Start a step; nobody is behind it."""
        super().begin(work)
        self._counts = [max(count, work.number) for count in self._counts]

    def apply(self, max_grad_norm: float | None) -> StepResult:  # noqa: ARG002  (each trainer clips its own share)
        """Serve until all trainers have pushed this step."""
        number = self._work.number
        while min(self._counts) <= number:
            letters = self._letters(1)
            self._apply_together(letters)
            for letter in letters:
                self._counts[letter.trainer] = letter.step + 1
                self._entries.setdefault(letter.step, {})[letter.trainer] = letter
                self._latest[letter.trainer] = letter
            self._unanswered += letters
            if min(self._counts) > number:
                self._complete(number)
            self._let_go_on()
        rows = self._entries.pop(number)
        entry, terms = _total(rows)
        return StepResult(number, self._work.size, entry.to(self.world.device), terms)

    @torch.no_grad()
    def _apply_together(self, letters: list[Push]) -> None:
        """Make one update of the weighted mean of some shares, as far as their part of a global batch goes."""
        shares = [letter.content["share"] for letter in letters]
        whole = sum(shares)
        if not whole:
            return
        for letter, share in zip(letters, shares, strict=True):
            brought = self._packing.unpack(letter.content["parcel"], self.world.device)
            for parameter, gradient in zip(self.parameters, brought, strict=True):
                if gradient is None or not share:
                    continue
                gradient.mul_(share / whole)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self.partial_update.check()
        hit(OPTIMIZER)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * whole
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter in self.parameters:
            parameter.grad = None
        self._check_slots()
        self.updates += 1

    def _complete(self, number: int) -> None:
        """Let the schedule go on, and the buffers become what the trainers made of them in this step."""
        if self.scheduler is not None:
            self.scheduler.step()
        rows = [letter.content["buffers"] for _, letter in sorted(self._entries[number].items())]
        if not rows[0]:
            return
        if not self.buffers.active or len(rows) == 1:
            self._keep_buffers(rows[0])
            return
        names = list(rows[0])
        self.buffers.begin()
        self.buffers.combine(
            lambda _: names,
            lambda _: {
                index: [row[name].to(self.world.device) for name in self.buffers.names or []]
                for index, row in enumerate(rows)
            },
        )
        self.buffers.settle()

    def _let_go_on(self) -> None:
        """Answer those that are not too far ahead of the slowest."""
        slowest = min(self._counts)
        entry, terms = _total(self._latest)
        able = [letter for letter in self._unanswered if letter.step + 1 - slowest <= self._staleness]
        if not float(entry[1]) > 0 and slowest < max(self._counts):
            return  # nobody has had a sample yet: the first loss is waited for
        if able:
            buffers = dict(self.model.named_buffers())
            sent = able[0].content["buffers"]
            answer = self._answer(None, entry, terms)
            answer["buffers"] = {name: buffers[name].detach().cpu().clone() for name in sent}
            self._unanswered = [letter for letter in self._unanswered if letter not in able]
            self._desk.answer(able, answer)


def _total(letters: Mapping[int, Push]) -> tuple[Tensor, dict[str, Tensor]]:
    """Add up the ledgers of some letters, in the order of the trainers."""
    entry = torch.zeros(2)
    terms: dict[str, Tensor] = {}
    for _, letter in sorted(letters.items()):
        entry = entry + letter.content["entry"]
        for name, one in letter.content["terms"].items():
            terms[name] = terms[name] + one if name in terms else one
    return entry, terms

"""A server that applies what trainers bring as it comes, and holds back those too far ahead: `--staleness s`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.state.optimizer_state import same_options
from paceline.strategies.parameter_server.push_queue import Push
from paceline.strategies.parameter_server.server import ServerPlacement
from paceline.strategies.replica import Replica
from paceline.strategies.result import StepResult
from paceline.world.fault_points import OPTIMIZER, hit


class AsyncUpdate:
    """Serves each trainer for itself."""

    def __init__(self, placement: ServerPlacement) -> None:
        self._placement = placement
        self._counts = [0] * placement.trainers
        """How many steps each trainer has pushed, in the numbers of the run; 0 before the first."""
        self._entries: dict[int, dict[int, Push]] = {}
        """The pushes of each step that is not complete, by trainer."""
        self._latest: dict[int, Push] = {}
        self._unanswered: list[Push] = []
        self.updates = 0
        """How many updates were made: fewer than pushes where some were taken together."""

    def apply(self, replica: Replica, max_grad_norm: float | None) -> StepResult:  # noqa: ARG002  (each trainer clips its own)
        """Serve until all trainers have pushed this step."""
        work = replica.step_state.work
        self._counts = [max(count, work.number) for count in self._counts]  # nobody is behind it
        while min(self._counts) <= work.number:
            pushes = self._placement.receive(1)
            for alike in _by_options(pushes):
                with self._placement.changing:  # one at a time: a pull waits for one update at most
                    self._apply_together(replica, alike)
            for push in pushes:
                self._counts[push.trainer] = push.step + 1
                self._entries.setdefault(push.step, {})[push.trainer] = push
                self._latest[push.trainer] = push
            self._unanswered += pushes
            if min(self._counts) > work.number:
                with self._placement.changing:
                    self._complete(replica, work.number)
            self._let_go_on()
        rows = self._entries.pop(work.number)
        entry, terms = _total(rows)
        return StepResult(work.number, work.size, entry.to(replica.world.device), terms)

    @torch.no_grad()
    def _apply_together(self, replica: Replica, pushes: list[Push]) -> None:
        """Make one update of the weighted mean of shares with the same options, as far as their part of a global batch goes."""
        shares = [self._new_share(push) for push in pushes]
        whole = sum(shares)
        if not whole:
            return
        parameters, optimizer = replica.step_state.parameters, replica.optimizer
        for push, share in zip(pushes, shares, strict=True):
            brought = self._placement.packing.unpack(push.content["packed"], replica.world.device)
            for parameter, gradient in zip(parameters, brought, strict=True):
                if gradient is None or not share:
                    continue
                gradient.mul_(share / whole)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        replica.partial_update.check()
        self._placement.take_options(pushes)
        hit(OPTIMIZER)
        with self._placement.stepped.watch():
            rates = [(group["lr"], group["lr"] * whole) for group in optimizer.param_groups]
            for group, (_, scaled) in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = scaled
            optimizer.step()
            for group, (rate, scaled) in zip(optimizer.param_groups, rates, strict=True):
                if group["lr"] is scaled:  # else the step has set another
                    group["lr"] = rate
        for parameter in parameters:
            parameter.grad = None
        self._placement.check_slots()
        self.updates += 1

    def _new_share(self, push: Push) -> float:
        """Return which part of a global batch a push brings that is not in the weights yet.

        When a group forms anew, trainers go back to the last step that all had pushed, and those that were ahead push once more.
        """
        applied = self._placement.applied.setdefault(push.step, set())
        samples: dict[int, int] = push.content["shards"]
        new = sum(count for shard, count in samples.items() if shard not in applied)
        applied.update(samples)
        share: float = push.content["share"]
        return share * new / max(1, sum(samples.values()))

    def _complete(self, replica: Replica, number: int) -> None:
        """Step the schedule, and set the buffers to what the trainers made of them in this step."""
        for trainer, push in self._entries[number].items():
            self._placement.wired.compare(number, trainer, push.content["members"])
        first = self._entries[number][min(self._entries[number])]
        self._placement.take_options([first])  # others may be further
        # Those behind this step by no more than the staleness may be taken again.
        for old in [step for step in self._placement.applied if step < number - self._placement.staleness]:
            del self._placement.applied[old]
        if replica.scheduler is not None:
            replica.step_schedule()
            self._placement.stepped.note()
        rows = [push.content["buffers"] for _, push in sorted(self._entries[number].items())]
        if not rows[0]:
            return
        if not replica.buffers.active or len(rows) == 1:
            self._placement.keep_buffers(rows[0])
            return
        names = list(rows[0])
        replica.buffers.begin()
        replica.buffers.combine(
            lambda _: names,
            lambda _: {
                index: [row[name].to(replica.world.device) for name in replica.buffers.names or []]
                for index, row in enumerate(rows)
            },
        )
        replica.buffers.end_step()

    def _let_go_on(self) -> None:
        """Answer those that are not too far ahead of the slowest."""
        slowest = min(self._counts)
        entry, terms = _total(self._latest)
        able = [push for push in self._unanswered if push.step + 1 - slowest <= self._placement.staleness]
        if not float(entry[1]) > 0 and slowest < max(self._counts):
            return  # nobody has had a sample yet: the first loss is waited for
        if able:
            buffers = dict(self._placement.model.named_buffers())
            sent = able[0].content["buffers"]
            answer = self._placement.answer_of(entry, terms)
            answer["buffers"] = {
                name: buffers[name].detach().cpu().clone() for name in sent if name in buffers
            }
            self._unanswered = [push for push in self._unanswered if push not in able]
            self._placement.queue.answer(able, answer)


def _by_options(pushes: list[Push]) -> list[list[Push]]:
    """Split pushes, in their order, where the options change: the rate of another step, or of other weights."""
    runs: list[list[Push]] = []
    for push in pushes:
        if runs and same_options(runs[-1][0].content["options"], push.content["options"]):
            runs[-1].append(push)
        else:
            runs.append([push])
    return runs


def _total(pushes: Mapping[int, Push]) -> tuple[Tensor, dict[str, Tensor]]:
    """Add up the ledgers of some pushes, in the order of the trainers."""
    entry = torch.zeros(2, dtype=torch.float64)
    terms: dict[str, Tensor] = {}
    for _, push in sorted(pushes.items()):
        entry = entry + push.content["entry"]
        for name, one in push.content["terms"].items():
            terms[name] = terms[name] + one if name in terms else one
    return entry, terms

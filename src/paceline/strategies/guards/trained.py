"""What trains, looked at before every step: a parameter that begins or ceases to train must be wired up anew on all workers.

A look is two passes over lists that are made once (some 30 ns for each parameter), because walking through a model
costs ten times as much.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from operator import attrgetter, is_
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.compat.tensors import hooks_of, post_accumulate_hooks_of
from paceline.errors import InputError
from paceline.strategies.guards.before_first_step import check_hooks
from paceline.strategies.guards.refusals import refuse_gradient_hooks
from paceline.strategies.guards.writes import checksum
from paceline.world import World
from paceline.world.base import Comm
from paceline.world.words import forget, hear, tell

_FLAG = attrgetter("requires_grad")
_turns: WeakKeyDictionary[Comm, int] = WeakKeyDictionary()


class HasParameters(Protocol):
    """A model, or the part of one that a worker has."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Yield the parameters."""


class Trained:
    """Which parameters of a model require gradients and which the optimizer holds, as they were when they were wired up."""

    def __init__(self, model: HasParameters, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.renew()

    def renew(self) -> None:
        """Take what is there now as what is wired up."""
        named = dict(self._model.named_parameters())
        check_hooks(named.items())
        self._names = list(named)
        self.parameters = list(named.values())
        """The model's parameters, whether they train or not."""
        self._flags = list(map(_FLAG, self.parameters))
        self._held = _held_by(self._optimizer.param_groups)

    @property
    def changed(self) -> bool:
        """Whether something else trains than what was wired up."""
        groups = self._optimizer.param_groups
        held = groups[0]["params"] if len(groups) == 1 else _held_by(groups)
        return (
            list(map(_FLAG, self.parameters)) != self._flags
            or len(held) != len(self._held)
            or not all(map(is_, held, self._held))
        )

    def check(self, strategy: str) -> None:
        """Raise where something has changed, for a strategy that cannot take it up, or in the middle of a step."""
        if self.changed:
            raise InputError(
                f"{self.words()} after the model was prepared, and {strategy} reduces only what was trainable then. "
                "Set requires_grad and the optimizer's groups before run.prepare, or change them between two steps under single, "
                "dp or ddp."
            )

    def check_hooks(self, unseen_by: str) -> None:
        """Raise where a hook was put on a parameter that no strategy can serve, or that the strategy `unseen_by` never calls."""
        if any(map(post_accumulate_hooks_of, self.parameters)):
            check_hooks(zip(self._names, self.parameters, strict=True))
        if unseen_by and any(map(hooks_of, self.parameters)):
            refuse_gradient_hooks(zip(self._names, self.parameters, strict=True), unseen_by)

    def words(self) -> str:
        """Return what has changed, for an error."""
        for name, parameter, before in zip(self._names, self.parameters, self._flags, strict=True):
            if parameter.requires_grad != before:
                return f"{name} {'began' if parameter.requires_grad else 'ceased'} to train (requires_grad)"
        return "the optimizer's parameters changed (add_param_group)"

    def signature(self) -> str:
        """Return what trains now in a form that workers can compare; of what is new its values too."""
        before = {id(one) for one, flag in zip(self.parameters, self._flags, strict=True) if flag}
        before &= {id(one) for one in self._held}
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        told = hashlib.sha256()
        for name, parameter in self._model.named_parameters():
            told.update(f"{name} {tuple(parameter.shape)} {parameter.requires_grad}\n".encode())
            if parameter.requires_grad and id(parameter) not in before:
                told.update(str(checksum(parameter)).encode())
        for group in self._optimizer.param_groups:
            told.update(repr([names.get(id(one), "?") for one in group["params"]]).encode())
        return told.hexdigest()


def _held_by(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def check_held(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise where the optimizer holds a parameter that the model has not."""
    known = {id(parameter) for parameter in model.parameters()}
    seen: set[int] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in seen:
                raise InputError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} twice, and would update it twice a step. "
                    "Name each parameter once: list(dict.fromkeys(parameters))."
                )
            seen.add(id(parameter))
            if id(parameter) not in known:
                raise InputError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model has not: its gradients "
                    "would be summed by nobody, and no checkpoint would hold it. Make it an attribute of the model, "
                    "self.scale = nn.Parameter(...); or give run.prepare a model and an optimizer that are made and hold it."
                )


def check_equal(tensors: Iterable[tuple[str, Tensor]], world: World) -> None:
    """Raise on all workers where their weights or buffers differ: something wrote to them, or to gradients, on some only."""
    named = list(tensors)
    if not named:
        return
    mine = torch.tensor([checksum(value) for _, value in named])
    rows = world.comm.all_gather(mine.to(world.device))
    for rank, row in enumerate(rows):
        if not torch.equal(row, rows[0]):
            name = named[int((row != rows[0]).nonzero()[0])][0]
            raise InputError(
                f"{name} differs between rank 0 and rank {rank}: something outside the optimizer changes weights, buffers or "
                "gradients on each worker alone (a write to .data in forward, an update by the loop). Do it alike on all "
                "workers, after step.apply(); a buffer that changes in forward needs a rule in the task's buffers()."
            )


def agree_on_change(world: World, number: int, trained: Trained) -> None:
    """Wait until every worker has seen the same change before this step, or raise.

    Workers on which nothing changed are in the step already and wait for this one, so no collective may be used here: each
    writes what it sees where the workers met.
    """
    if world.size == 1 or world.store is None:
        return
    turn = _turns[world.comm] = _turns.get(world.comm, 0) + 1
    mine = f"{number} {trained.signature()}"
    key = f"trained/{turn}"
    tell(world, key, mine)

    def late(rank: int, when: str) -> InputError:
        return InputError(
            f"step {number}: {trained.words()} on rank {world.rank}, but not on rank {rank}: it "
            f"has not said so {when}. Change what trains on every worker before the same step."
        )

    for rank, word in hear(world, key, late):
        if word != mine:
            raise InputError(
                f"step {number}: {trained.words()} on rank {world.rank}, but differently on rank {rank}, or with other "
                "values. Change the same on every worker before the same step, and seed torch before making new parameters."
            )
    forget(world, f"trained/{turn - 1}")  # all have come to this turn, so all have heard the one before

"""The model and the optimizer that a loop of the user's own holds: they stay the live ones when a group forms anew.

Where the state is sharded, the next group makes model and optimizer anew. The objects that the loop holds then become
those: they take over class and contents, module by module, so that what the loop calls is what is trained. What the
loop itself has put on its modules since then (train or eval mode, hooks, attributes) stays on them.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from paceline.compat.modules import HOOK_TABLES, children_of
from paceline.strategies.in_turns.models import called
from paceline.strategies.in_turns.optimizers import Optimizers
from paceline.strategies.precision import Precision, widened
from paceline.strategies.replica import Replica

Contents: TypeAlias = dict[str, dict[str, set[int]]]
"""Which attributes and hooks each module has, by the module's name."""
_MARK = "_paceline_autocast"


class Handle:
    """What `run.prepare` gave to the loop."""

    def __init__(self, replica: Replica, precision: Precision) -> None:
        self.model: nn.Module = replica.model
        self.optimizer: Optimizer = replica.optimizer
        self._precision = precision
        self._known = self._switch(_contents(self.model))

    def adopt(self, replica: Replica) -> None:
        """Turn the loop's model and optimizer into those of another replica, and make the replica use them."""
        if replica.model is not self.model:
            known = _contents(replica.model)
            made, held = (
                dict(model.named_modules(remove_duplicate=False)) for model in (replica.model, self.model)
            )
            for name, module in held.items():
                # A second name leads to one once more.
                if name in made and vars(module) is not vars(made[name]):
                    _carry_over(module, made[name], self._known.get(name, {}))
                    _become(module, made[name])
            for name, module in held.items():
                for child in children_of(module):  # names alone do not replace
                    path = f"{name}.{child}".lstrip(".")
                    children_of(module)[child] = held.get(path, children_of(module)[child])
            replica.model = self.model
            self._known = self._switch(known)
        if replica.optimizer is not self.optimizer:
            if isinstance(self.optimizer, Optimizers) and isinstance(replica.optimizer, Optimizers):
                for name, one in self.optimizer.optimizers.items():  # which the loop holds by themselves
                    _become(one, replica.optimizer[name])
                    replica.optimizer.optimizers[name] = one
            _become(self.optimizer, replica.optimizer)
            replica.optimizer = self.optimizer

    def _switch(self, known: Contents) -> Contents:
        """Make the model compute in the run's precision; return its known contents with the hooks that this adds."""
        if self._precision.name != "fp32":
            for name, module in called(self.model).items():
                before = _content(module)
                _autocast_forward(module, self._precision)
                for key, hooks in _content(module).items():
                    if key not in before or hooks:
                        known[name].setdefault(key, set()).update(hooks - before.get(key, set()))
        return known


def _contents(model: nn.Module) -> Contents:
    return {name: _content(module) for name, module in model.named_modules()}


def _content(module: nn.Module) -> dict[str, set[int]]:
    return {key: set(value) if key in HOOK_TABLES else set() for key, value in vars(module).items()}


def _carry_over(old: nn.Module, new: nn.Module, known: dict[str, set[int]]) -> None:
    """Move to a module what was put on the one before it since `known`; a hook's number is its own in the whole process."""
    new.training = old.training
    for key, value in vars(old).items():
        if key in HOOK_TABLES:
            added = {number: hook for number, hook in value.items() if number not in known.get(key, set())}
            vars(new)[key].update(added)
        elif key not in known and key not in vars(new):
            vars(new)[key] = value


def _become(one: object, other: object) -> None:
    """Turn an object into another one: its class and its attributes."""
    one.__class__ = other.__class__
    object.__setattr__(one, "__dict__", vars(other))


def _autocast_forward(model: nn.Module, precision: Precision) -> None:
    """Make the model's forward pass compute in `precision` and hand out fp32, so that a loss outside stays exact."""
    if vars(model).get(_MARK):
        return
    vars(model)[_MARK] = True  # beside the hooks: a module that gets other contents has neither
    open_contexts: list[contextlib.AbstractContextManager[object]] = []

    def enter(_: nn.Module, __: Any) -> None:
        context = precision.autocast()
        context.__enter__()
        open_contexts.append(context)

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        open_contexts.pop().__exit__(None, None, None)
        return widened(output)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)

"""Parameters that an optimizer has and its model has not, such as a learned loss weight: a module of their own beside the model.

So they are summed, saved, resumed and handed to workers that join like any other, and the loop's model stays as it is: its
`parameters()` and `state_dict()` have nothing more.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.compat.modules import children_of, parameters_of
from paceline.errors import InputError
from paceline.strategies.in_turns.models import Models

MODEL, OUTSIDE = "model", "outside"
_LISTS = (nn.ParameterList, nn.ParameterDict)
"""Modules that have no pass and no buffers."""


class WithOutside(Models):
    """A model and the parameters beside it."""

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        super().__init__({MODEL: model, OUTSIDE: nn.ParameterList(parameters)})


@dataclass(frozen=True)
class OfOwn:
    """A function of (model, batch) that is given the loop's own model; equal for the same function, as compared steps need."""

    function: Callable[..., Any]

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Call it."""
        return self.function(own_model(model), batch)


def parameters_outside(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the optimizer's parameters that the model has not, in their order; raise for tensors that are no parameters."""
    known = {id(one) for one in model.parameters()}
    held = [one for group in optimizer.param_groups for one in group["params"]]
    found = {id(one): one for one in held if id(one) not in known}
    for one in found.values():
        if not isinstance(one, nn.Parameter):
            raise InputError(
                f"the optimizer holds a tensor of shape {tuple(one.shape)} that is no nn.Parameter of the model. Make it one: "
                "scale = nn.Parameter(torch.ones(()))."
            )
    _check_bare(found.values())
    return list(found.values())


def _check_bare(parameters: Iterable[Tensor]) -> None:
    """Raise for those of a module that was forgotten: its buffers and its passes would be in no run."""
    places = {id(one): place for place, one in enumerate(parameters)}
    if not places:
        return
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    found: list[tuple[int, str]] = []
    for module in modules:
        if isinstance(module, (*_LISTS, WithOutside)):
            continue
        held = {id(one) for one in parameters_of(module).values()}
        below = (one for one in children_of(module).values() if isinstance(one, _LISTS))
        held |= {id(value) for one in below for value in parameters_of(one).values()}
        found += [(places[one], type(module).__name__) for one in held & set(places)]
    if found:
        # The first by the optimizer's order: every worker names the same.
        raise InputError(
            f"the optimizer holds parameters of a {min(found)[1]} that is not in the model. Give both by name: "
            'run.prepare({"model": model, "other": module}, {"all": optimizer}).'
        )


def own_model(model: nn.Module) -> nn.Module:
    """Return the model that the loop has given."""
    return model[MODEL] if isinstance(model, WithOutside) else model


def of_own(model: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (model, batch) as it is called with what is trained."""
    return OfOwn(function) if isinstance(model, WithOutside) else function

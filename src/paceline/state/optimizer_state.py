"""The state of a replica by name, so that it moves between strategies and numbers of workers."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import WeakSet, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import CheckpointError, InputError


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state keyed by parameter name instead of by position."""
    names = _names(model, optimizer)
    packed = packed_state(optimizer)
    own = own_entries(packed["state"])
    return {
        **({"own": own} if own else {}),
        "state": {names[key]: dict(entry) for key, entry in packed["state"].items() if key not in own},
        "groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in packed["param_groups"]
        ],
    }


def packed_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's `state_dict` without what it has kept of parameters that are in no group any more.

    It updates none of them. torch numbers parameters by their places in the groups, and fails where one has none.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    gone = [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in held]
    kept = {key: optimizer.state.pop(key) for key in gone}
    try:
        packed = optimizer.state_dict()
    finally:
        optimizer.state.update(kept)
    if not isinstance(packed, Mapping) or not packed.keys() >= {"state", "param_groups"}:
        raise InputError(
            f"{type(optimizer).__name__}.state_dict() has another form than torch's: no 'state' and 'param_groups', by which a "
            "run names what belongs to which parameter. Leave its state_dict() out and keep everything in self.state[parameter], "
            "or give run.prepare several optimizers by name."
        )
    return packed


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, saved: dict[str, Any], *, grows: bool = False
) -> None:
    """Load what `optimizer_state` gave; where the optimizer `grows`, with the groups that were added to it in between."""
    there = [group["params"] for group in saved["groups"]]
    here = _named_groups(model, optimizer)
    added = there[len(here) :] if _are_same(here, there[: len(here)]) else []
    known = dict(model.named_parameters())
    if added and known.keys() >= {name for group in added for name in group}:
        if not grows:
            raise CheckpointError(
                f"{added[0][0]} was added to the optimizer during the run (add_param_group), which this strategy "
                "cannot take up. Use --strategy single, dp or ddp."
            )
        for group in added:
            optimizer.add_param_group({"params": [known[name] for name in group]})
        here = _named_groups(model, optimizer)
    if not _are_same(here, there):
        moved = sorted(
            {name for group in there for name in group} ^ {name for group in here for name in group}
        )
        raise CheckpointError(
            f"the checkpoint's optimizer has parameter groups of {[len(group) for group in there]} parameters, "
            f"this one of {[len(group) for group in here]}, and they do not hold the same"
            f"{' (' + ', '.join(moved[:5]) + ')' if moved else ''}. Use the task that wrote the checkpoint."
        )
    numbers = {name: number for number, name in enumerate(_names(model, optimizer))}
    places = [group["params"] for group in packed_state(optimizer)["param_groups"]]
    groups = list(optimizer.param_groups)
    optimizer.load_state_dict(
        {
            "state": {numbers[name]: dict(entry) for name, entry in saved["state"].items()}
            | saved.get("own", {}),
            # torch matches parameters by their place, so the places are this optimizer's.
            "param_groups": [
                {**group, "params": mine} for group, mine in zip(saved["groups"], places, strict=True)
            ],
        }
    )
    _restore_types(model, optimizer, saved["state"])
    # torch puts other dicts in their place, and a loop may hold one: group = optimizer.param_groups[0].
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    optimizer.param_groups[:] = groups


def _restore_types(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Give state the type back that it was saved with: torch gives it that of its parameter.

    NAdam keeps a product in single precision whatever it trains, others a copy of half precision weights. What torch calls
    "step" it treats by itself.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = dict(zip(_names(model, optimizer), held, strict=True))
    for name, entry in saved.items():
        loaded = optimizer.state.get(parameters[name], {})
        for key, value in entry.items():
            if key != "step" and key in loaded:
                loaded[key] = _with_types(loaded[key], value)


def _with_types(loaded: Any, saved: Any) -> Any:
    """Return what was loaded, but tensors that have lost their type as they were saved."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.detach().to(loaded.device, copy=True)
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        return {key: _with_types(one, saved.get(key)) for key, one in loaded.items()}
    if type(loaded) in (list, tuple) and isinstance(saved, list | tuple) and len(saved) == len(loaded):
        return type(loaded)(map(_with_types, loaded, saved))
    return loaded


def drop_groups(optimizer: Optimizer, count: int) -> bool:
    """Keep the first `count` groups alone, and return whether there were more.

    A function that adds groups on its way adds them again when it is resumed; what belongs to them is loaded after that.
    """
    dropped = optimizer.param_groups[count:]
    del optimizer.param_groups[count:]
    for parameter in (one for group in dropped for one in group["params"]):
        optimizer.state.pop(parameter, None)
    return bool(dropped)


HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that say how a worker computes its update, not what it comes to."""
_UNCHANGING = frozenset({bool, int, float, str, type(None)})
Options = list[dict[str, Any]]
"""What each group of an optimizer holds beside its parameters."""


def options_of(optimizer: Optimizer) -> Options:
    """Return the options of each group, in memory of their own where they can be written to."""
    return [
        {
            key: value if type(value) in _UNCHANGING else _copied(value)
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def saved_options_of(optimizer: Optimizer) -> Options:
    """Return those that a checkpoint can hold."""
    return [
        {key: value for key, value in group.items() if _is_plain(value)} for group in options_of(optimizer)
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | Tensor) or is_numpy(value)


def options_to_tell(optimizer: Optimizer) -> Options:
    """Return, for each group, what another worker is to update with."""
    return [
        {key: value for key, value in group.items() if key not in HOW}
        for group in saved_options_of(optimizer)
    ]


def same_options(these: Options, those: Options) -> bool:
    """Return whether two lists of options are the same."""
    return len(these) == len(those) and all(
        one.keys() == other.keys() and all(same_option(one[key], other[key]) for key in one)
        for one, other in zip(these, those, strict=True)
    )


def same_option(one: Any, other: Any) -> bool:
    """Return whether two values of an option are the same."""
    for kind in (Tensor, np.ndarray):
        if isinstance(one, kind) or isinstance(other, kind):
            both = isinstance(one, kind) and isinstance(other, kind)
            return both and repr(one.tolist()) == repr(other.tolist())  # in which NaN is NaN
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_option, one, other))
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124  (no two NaN are equal)


def set_options(optimizer: Optimizer, then: Options, *, removes: bool = False) -> None:
    """Set the groups to what `options_of` returned for them; what is in none of it stays unless this `removes` it."""
    for group, options in zip(optimizer.param_groups, then, strict=False):
        if removes:
            for key in group.keys() - options.keys() - {"params"}:
                del group[key]
        for key, value in options.items():
            here = group.get(key)
            if isinstance(here, Tensor) and isinstance(value, Tensor) and here.shape == value.shape:
                with torch.no_grad():
                    here.copy_(value)
            elif isinstance(here, list) and isinstance(value, list):
                here[:] = copy.deepcopy(value)  # the loop may hold it
            else:
                group[key] = _copied(value)


def _copied(value: Any) -> Any:
    if (type(value) is tuple and _UNCHANGING.issuperset(map(type, value))) or callable(value):
        return value
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _named_groups(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    names = iter(_names(model, optimizer))
    return [[next(names) for _ in group["params"]] for group in optimizer.param_groups]


def _are_same(left: list[list[str]], right: list[list[str]]) -> bool:
    return [sorted(group) for group in left] == [sorted(group) for group in right]


def own_entries(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what an optimizer keeps under names of its own (`self.state["global"]`), beside what it keeps of parameters."""
    return {key: entry for key, entry in state.items() if isinstance(key, str)}


_watched: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose first step is looked at. The look stays where it is: torch goes through a step's hooks as they are."""


def check_own_entries(optimizer: Optimizer, *, kept: bool) -> None:
    """Raise, now or after the first step, where an optimizer keeps what a checkpoint or this strategy cannot hold."""
    _check_own_entries(optimizer, kept=kept)
    if optimizer in _watched:
        return
    _watched.add(optimizer)
    looked = False

    def look(stepped: Optimizer, *_: Any) -> None:
        nonlocal looked
        if not looked:
            looked = True
            _check_own_entries(stepped, kept=kept)

    optimizer.register_step_post_hook(look)


def _check_own_entries(optimizer: Optimizer, *, kept: bool) -> None:
    own = own_entries(optimizer.state)
    kind = type(optimizer).__name__
    if own and not kept:
        raise InputError(
            f"{kind} keeps state {next(iter(own))!r} that belongs to no parameter, and this strategy cuts the optimizer's "
            "state up by parameters. Use --strategy ddp."
        )
    strange = [key for key in optimizer.state if not isinstance(key, str | Tensor)]
    if strange:
        raise InputError(
            f"{kind} keeps state under {strange[0]!r:.40}, which is neither a parameter nor a name, so no checkpoint could "
            "hold it. Use a name: self.state['global']."
        )
    plain(dict(own), f"the state of {kind}")


def check_form(optimizer: Optimizer) -> None:
    """Raise where an optimizer tells its state in a form of its own: already the end of a run looks at it by parameters."""
    if type(optimizer).state_dict is not Optimizer.state_dict:
        packed_state(optimizer)


def check_dense(optimizer: Optimizer) -> None:
    """Raise where an optimizer keeps a sparse tensor, which no checkpoint holds: SGD with momentum for gradients of rows."""
    for slots in optimizer.state.values():
        for slot, value in slots.items() if isinstance(slots, Mapping) else ():
            if isinstance(value, Tensor) and value.layout is not torch.strided:
                raise InputError(
                    f"{type(optimizer).__name__} keeps {slot} of a parameter as a sparse tensor, because its gradient is one "
                    "(nn.Embedding(sparse=True)), and no checkpoint could hold it. Use SGD without momentum, Adagrad or "
                    "SparseAdam, or leave sparse=True out."
                )


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the name of each parameter in the order in which the optimizer numbers them."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [known.get(id(parameter), outside_name(number)) for number, parameter in enumerate(parameters)]


_OUTSIDE = "outside the model."


def outside_name(number: int) -> str:
    """Return the name of a parameter that the optimizer has and the model has not."""
    return f"{_OUTSIDE}{number}"


def is_outside(name: str) -> bool:
    """Return whether that is the name of a parameter which is not the model's."""
    return name.startswith(_OUTSIDE)


_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial, type, ref)
NUMPY_KINDS = "biufcSU"
"""Types of numpy that a checkpoint holds: numbers and text."""
_KEPT_MAPPINGS: tuple[type, ...] = (Counter, OrderedDict)


def plain(value: Any, where: str = "the state") -> Any:
    """Return what a checkpoint can hold: numbers, strings, tensors, arrays, lists and dicts.

    Functions in a dict are left out: whoever makes the schedule again makes them again. Numbers and arrays of numpy stay what
    they are: single precision would go on in double. Anything else would be lost, so it is refused by name.
    """
    if value is None or isinstance(value, bool | int | float | str | Tensor) or is_numpy(value):
        return value.copy() if isinstance(value, np.ndarray) else value
    if isinstance(value, dict):
        kept = {
            key: plain(item, f"{where}, {key!r}") for key, item in value.items() if not _is_made_again(item)
        }
        return type(value)(kept) if type(value) in _KEPT_MAPPINGS else kept
    if isinstance(value, list | tuple):
        items = [plain(item, where) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    raise CheckpointError(
        f"cannot hold {where}: it is a {type(value).__name__}, and a checkpoint holds only tensors, numbers, strings, lists and "
        "dicts. Keep it out of state_dict(), or give it as one of those."
    )


def is_numpy(value: Any) -> bool:
    """Return whether this is a number or an array of numpy that bytes can say: of numbers or of text, not of objects."""
    return isinstance(value, np.generic | np.ndarray) and value.dtype.kind in NUMPY_KINDS


def _is_made_again(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, _FUNCTIONS) for item in value)
    return isinstance(value, _FUNCTIONS)

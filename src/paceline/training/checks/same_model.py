"""Whether all workers make the same model: sums of gradients and parts of weights go by a parameter's place, not by its name.

Where one worker's names come in another order, what belongs to one parameter would be added to another of the same shape. So
the first worker of a group that has made its model leaves word of it before it is placed, and the others compare; nobody
waits.
"""

from __future__ import annotations

import json
import zlib
from base64 import b85decode, b85encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed import DistError
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.strategies.base import StrategyInputs
from paceline.strategies.guards.option_texts import read_options
from paceline.world import World
from paceline.world.base import Comm
from paceline.world.words import leave_first

_ORDER = (
    "Every worker must make the same: what goes through a set, or through os.listdir without sorted(), comes in another order in "
    "each process (torchrun's have a PYTHONHASHSEED each), and get_rank() is another on each. Sort the names."
)
_Forms = list[list[Any]]
_prepared: WeakKeyDictionary[Comm, int] = WeakKeyDictionary()
"""How many models a group has prepared: one process may open several runs in it, one after the other."""


def made_alike(inputs: StrategyInputs, world: World, *, formed_anew: bool = False) -> StrategyInputs:
    """Return inputs whose model and optimizer are compared where they are made.

    In a group that has `formed_anew` some may have trained, and changed what trains, its shapes and its groups: all of that is
    handed on by name to who joins, so the order of the names alone is compared.
    """
    if world.size == 1 or world.store is None:
        return inputs
    names: dict[int, str] = {}
    nth = _prepared.get(world.comm, 0)
    _prepared[world.comm] = nth + 1

    def look(model: nn.Module) -> nn.Module:
        names.update((id(one), name) for name, one in model.named_parameters())
        _compare_models(_forms(model), world, nth, names_alone=formed_anew)
        return model

    def look_at_groups(model: nn.Module) -> Optimizer:
        made = inputs.make_optimizer(model)
        if isinstance(made, Optimizer) and not formed_anew:
            # One that was made over the user's model holds its parameters, whatever they were replaced by.
            known = names | {id(one): name for name, one in model.named_parameters()}
            _compare_groups(_groups(made, known), world, nth)
        return made

    if inputs.carries_on and inputs.previous is not None:
        look(inputs.previous.model)
    return replace(inputs, make_model=lambda: look(inputs.make_model()), make_optimizer=look_at_groups)


def _forms(model: nn.Module) -> _Forms:
    """Return the name of each parameter and buffer in the model's order, and what it is."""
    return [
        [name, f"{kind} of {tuple(one.shape)}, {str(one.dtype).removeprefix('torch.')}{trains}"]
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
        for name, one in named
        for trains in (", that does not train" if kind == "parameter" and not one.requires_grad else "",)
    ]


def _groups(optimizer: Optimizer, names: dict[int, str]) -> _Forms:
    """Return the names that each group of an optimizer holds, whose order changes nothing, and the plain options it reads."""
    return [
        [
            sorted(names.get(id(one), f"one of {tuple(one.shape)}") for one in group["params"]),
            {
                key: repr(group[key])
                for key in read
                if key in group and isinstance(group[key], bool | int | float | str | None)
            },
        ]
        for group, read in read_options(optimizer)
    ]


def _compare_models(mine: _Forms, world: World, nth: int, *, names_alone: bool) -> None:
    rank, theirs = _first(world, f"model/{nth}", mine)
    here, there = mine, theirs
    if names_alone:
        both = {name for name, _ in mine} & {name for name, _ in theirs}
        here, there = ([[name, ""] for name, _ in one if name in both] for one in (mine, theirs))
    for place, (one, other) in enumerate(zip(here, there, strict=False)):
        if one[0] != other[0]:
            raise InputError(
                f"the model has its parameters and buffers in another order, or by other names, on rank {world.rank} than on "
                f"rank {rank}: number {place} is {one[0]} here and {other[0]} there. {_ORDER}"
            )
        if one[1] != other[1]:
            raise InputError(
                f"the model is another on rank {world.rank} than on rank {rank}: {one[0]} is a {one[1]} here and a {other[1]} "
                f"there. {_ORDER}"
            )
    if len(here) != len(there):
        more, others = (world.rank, here) if len(here) > len(there) else (rank, there)
        name = others[min(len(here), len(there))][0]
        raise InputError(
            f"the model has {len(here)} parameters and buffers on rank {world.rank} and {len(there)} on rank {rank}: {name} is "
            f"on rank {more} alone. {_ORDER}"
        )


def _compare_groups(mine: _Forms, world: World, nth: int) -> None:
    rank, theirs = _first(world, f"optimizer/{nth}", mine)
    if len(mine) != len(theirs):
        raise InputError(
            f"the optimizer has {len(mine)} groups on rank {world.rank} and {len(theirs)} on rank {rank}. {_ORDER}"
        )
    for number, ((held, options), (other, theirs_too)) in enumerate(zip(mine, theirs, strict=True)):
        if held != other:
            name = next(iter(sorted({*held} ^ {*other})), held[0] if held else "nothing")
            raise InputError(
                f"group {number} of the optimizer holds other parameters on rank {world.rank} than on rank {rank}: {name} is "
                f"in it on {world.rank if name in held else rank} alone. {_ORDER}"
            )
        for key in sorted({*options} | {*theirs_too}):
            if options.get(key) != theirs_too.get(key):
                raise InputError(
                    f"{key} of the optimizer's group {number} is {options.get(key)} on rank {world.rank} and "
                    f"{theirs_too.get(key)} on rank {rank}. Every worker must make the same optimizer."
                )


def _first(world: World, what: str, mine: Sequence[Any]) -> tuple[int, Any]:
    """Return what the first worker that has made its own said of it, and which it is."""
    with suppress(DistError):  # the group breaks, which is noticed where its workers train together
        word = b85encode(zlib.compress(json.dumps(mine).encode(), 1)).decode()
        said, _, theirs = leave_first(world, f"same/{what}", f"{world.rank} {word}").partition(" ")
        return int(said), json.loads(zlib.decompress(b85decode(theirs)))
    return world.rank, mine

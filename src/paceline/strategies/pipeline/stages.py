"""Where a model is cut into pipeline stages.

A model is a chain of units. In an nn.Sequential each member is one. Elsewhere they are found by following one forward
pass, on the meta device, so nothing is computed: what comes before the first of the repeated blocks, then each block, the
last one with all that comes after. A chain is cut where the stages come out alike, counted half in parameters and half
in operations. All of it is a function of the model and the shapes of a batch: every worker cuts alike.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.compat.modules import children_of, is_hooked
from paceline.compat.pytree import tree_iter
from paceline.errors import InputError, UnknownNameError
from paceline.strategies.guards.absent import form_of
from paceline.strategies.guards.scripted import refuse_scripted
from paceline.strategies.pipeline.model_copy import ModelCopy
from paceline.strategies.pipeline.values import WithValues, own_values
from paceline.strategies.pipeline.values import without_values as on_meta
from paceline.world import seeds


@dataclass(frozen=True)
class Chain:
    """A model as a row of units."""

    sequential: bool
    """Whether the units are modules that are called one after the other, and nothing else happens."""
    names: tuple[str, ...]
    """The module at which each unit begins; the first begins with the model itself."""
    costs: tuple[float, ...]
    owners: Mapping[str, tuple[int, ...]]
    """The units that use each parameter and buffer."""
    values: bool = False
    """Whether the forward pass needs its arguments' values: looks at them before a cut, or takes an argument up behind one."""

    def cut(self, stages: int) -> tuple[int, ...]:
        """Return the unit at which each stage begins, such that the heaviest stage is as light as can be."""
        if stages > len(self.names):
            raise InputError(
                f"pp cuts the model into {stages} stages, but it has {len(self.names)} layers to cut between. "
                f"Use at most {len(self.names)} stages: fewer --workers, or fewer stages a worker."
            )
        return balanced(self.costs, stages)

    def places(self, starts: Sequence[int]) -> dict[str, int]:
        """Return the stage that holds each parameter and buffer, or refuse one that several would need."""
        found: dict[str, int] = {}
        for name, units in self.owners.items():
            stages = sorted({bisect_right(starts, unit) - 1 for unit in units})
            if len(stages) > 1:
                same = [other for other, its in self.owners.items() if its == units]
                raise InputError(
                    f"the stages {stages[0]} and {stages[-1]} of the pipeline share {' and '.join(same[:4])}, but each worker "
                    "holds the weights of its own stages only. Untie them, or cut elsewhere with pipeline_stages()."
                )
            found[name] = stages[0]
        return found


_CUT = "follow the calls in it, and so cut it into stages"


def chain_of(
    model: nn.Module, given: Sequence[str] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Chain:
    """Find the units of a model from one call of it; `given` names the modules at which stages may begin."""
    refuse_scripted([("", model)], "pp", _CUT)
    if type(model).forward is nn.Sequential.forward and next(model.children(), None):
        return _chain_of_members(model, given, args)
    names = ("", *(_repeated(model) if given is None else _expanded(given, model)))
    refuse_scripted(((name, model.get_submodule(name)) for name in names), "pp", _CUT)
    values = False
    try:
        try:
            call = on_meta((args, dict(kwargs)))
            operations, used, values = _followed(model, names[1:], call, nullcontext())
        except (RuntimeError, NotImplementedError):  # it looks at values
            call, values = own_values((args, dict(kwargs))), True
            with seeds.preserved():
                operations, used, _ = _followed(model, names[1:], call, WithValues(call))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"pp cannot follow the forward pass of {type(model).__name__} without computing it ({_short(error)}). "
            "Write the model as an nn.Sequential, or use fsdp, which shards any model."
        ) from error
    owners = _owners(model, lambda name: used.get(name, set()), lambda name: _unit_of(name, names))
    return Chain(False, names, _costs(model, operations, owners), owners, values)


def _chain_of_members(model: nn.Module, given: Sequence[str] | None, args: tuple[Any, ...]) -> Chain:
    layers = members(model)
    cuts = layers[1:] if given is None else _expanded(given, model)
    wrong = [name for name in cuts if name not in layers[1:]]
    if wrong:
        raise InputError(
            f"pipeline_stages() names {wrong[0]}, at which no stage can begin: it is no layer of the nn.Sequential after the "
            f"first. Use {', '.join(layers[1:])}."
        )
    starts = [0, *sorted(layers.index(name) for name in cuts)]
    try:
        counted = _counted(model, layers, args)
    except Exception:  # noqa: BLE001  (what a layer does that the meta device cannot only leaves its operations uncounted)
        counted = [0.0] * len(layers)
    operations = [sum(counted[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)]

    def lies_in(name: str) -> int:
        # What the nn.Sequential holds itself none of its layers uses.
        place = next((place for place, layer in enumerate(layers) if name.startswith(f"{layer}.")), 0)
        return bisect_right(starts, place) - 1

    owners = _owners(model, lambda name: {lies_in(name)}, lies_in)
    names = ("", *(layers[start] for start in starts[1:]))
    return Chain(True, names, _costs(model, operations, owners), owners)


def balanced(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Cut a row of costs into parts, none empty, so that the largest sum is least; give where each begins."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        end: (sums[end], (0,)) for end in range(1, len(costs) + 1)
    }
    for part in range(2, parts + 1):
        best = {
            end: min(
                (max(best[middle][0], sums[end] - sums[middle]), (*best[middle][1], middle))
                for middle in range(part - 1, end)
            )
            for end in range(part, len(costs) + 1)
        }
    return best[len(costs)][1]


def members(model: nn.Module, prefix: str = "") -> list[str]:
    """Return the layers of a sequential model, those of plain sequences inside it one by one."""
    names = []
    for name, child in children_of(model).items():  # named_children leaves out a layer's second place
        plain = type(child) is nn.Sequential and len(child) and not is_hooked(child)
        names += members(child, f"{prefix}{name}.") if plain and child is not None else [f"{prefix}{name}"]
    return names


def _repeated(model: nn.Module) -> list[str]:
    """Return the names of the repeated blocks: the longest list of modules there is."""
    found: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            names = [f"{path}.{name}".lstrip(".") for name, _ in module.named_children()]
            found = max(found, names, key=len)
    if len(found) < 2:
        raise InputError(
            f"pp finds no row of layers in {type(model).__name__} to cut between. Write it as an nn.Sequential, keep its blocks "
            "in an nn.ModuleList, or name the modules at which stages begin in pipeline_stages()."
        )
    return found


def _expanded(given: Sequence[str], model: nn.Module) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    found: list[str] = []
    for pattern in given:
        matching = [
            name for name in names if fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")
        ]
        if not matching:
            raise UnknownNameError("module in pipeline_stages():", pattern, names)
        found += [name for name in matching if name not in found]
    return found


class _Uses(TorchFunctionMode):
    """Notes which unit is at work when a parameter or buffer is used."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.unit = 0
        self.found: dict[str, set[int]] = {}
        self.handed: set[int] = set()
        """What a unit was handed at its beginning."""
        self.late = False
        """Whether a unit after the first has used something nameless, an argument, that it was not handed."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, Tensor) and (name := self._names.get(id(leaf))) is not None:
                self.found.setdefault(name, set()).add(self.unit)
                self.late |= not name and self.unit > 0 and id(leaf) not in self.handed
        return func(*args, **(kwargs or {}))


def _followed(
    model: nn.Module,
    cuts: Sequence[str],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    following: AbstractContextManager[Any],
) -> tuple[list[float], dict[str, set[int]], bool]:
    """Run one forward pass of a model without values; give the operations of each unit and who uses what.

    And whether a unit after the first takes up an argument that was not handed to it.
    """
    from torch.utils.flop_counter import FlopCounterMode

    model = with_stand_ins(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    arguments = [("", leaf) for leaf in tree_iter(call) if isinstance(leaf, Tensor)]
    uses = _Uses({id(tensor): name for name, tensor in [*arguments, *tensors]})
    counter = FlopCounterMode(display=False)
    reached: list[float] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            for leaf in tree_iter((args, kwargs)):
                uses.handed.add(id(leaf))
            expected = cuts[len(reached)] if len(reached) < len(cuts) else None
            if name != expected:
                raise InputError(
                    f"pp needs each of the modules {', '.join(cuts[:3])}{', ...' if len(cuts) > 3 else ''} called once and in "
                    f"this order, but the forward pass calls {name} where {expected or 'the end'} was due. "
                    "Name the modules at which stages begin in pipeline_stages()."
                )
            reached.append(float(counter.get_total_flops()))
            uses.unit = len(reached)

        return hook

    for name in cuts:
        model.get_submodule(name).register_forward_pre_hook(enter(name), with_kwargs=True)
    with torch.no_grad(), counter, uses, following:
        model(*call[0], **call[1])
    if len(reached) < len(cuts):
        raise InputError(
            f"pp is to cut the model at {cuts[len(reached)]}, but its forward pass never calls that. "
            "Name the modules at which stages begin in pipeline_stages()."
        )
    ends = [*reached, float(counter.get_total_flops())]
    return [end - start for start, end in zip([0.0, *reached], ends, strict=True)], uses.found, uses.late


def _owners(
    model: nn.Module, users: Callable[[str], set[int]], fallback: Callable[[str], int]
) -> dict[str, tuple[int, ...]]:
    """Return the units of each tensor, one that has two names under both; what nobody uses belongs where it lies."""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    units: dict[int, set[int]] = {}
    for name, tensor in tensors:
        units.setdefault(id(tensor), set()).update(users(name))
    return {name: tuple(sorted(units[id(tensor)] or {fallback(name)})) for name, tensor in tensors}


def _unit_of(name: str, names: Sequence[str]) -> int:
    return next((unit for unit, cut in enumerate(names) if cut and name.startswith(f"{cut}.")), 0)


def _counted(model: nn.Module, layers: Sequence[str], args: tuple[Any, ...]) -> list[float]:
    """Count the operations of each layer of a sequential model."""
    from torch.utils.flop_counter import FlopCounterMode

    (value,), counts = on_meta(args), []
    model = with_stand_ins(model)
    with torch.no_grad():
        for name in layers:
            with FlopCounterMode(display=False) as counter:
                value = model.get_submodule(name)(value)
            counts.append(float(counter.get_total_flops()))
    return counts


def with_stand_ins(model: nn.Module) -> nn.Module:
    """Copy a model to try a pass on: its tensors lie on the meta device, and what else it changes are copies too."""
    tensors = stand_ins(model)
    try:
        return copy.deepcopy(model, dict(tensors))
    except TypeError:  # it holds a lock, a file, a generator
        return ModelCopy(model, tensors).model


def stand_ins(model: nn.Module, names: frozenset[str] = frozenset()) -> dict[int, Tensor]:
    """Return what takes the place of each tensor: itself where it is named, one on the meta device elsewhere."""
    memo: dict[int, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in names:
            memo[id(tensor)] = tensor
        elif isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(form_of(tensor), tensor.requires_grad)
        else:
            memo[id(tensor)] = form_of(tensor)
    return memo


def _short(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__


def _costs(
    model: nn.Module, operations: Sequence[float], owners: Mapping[str, tuple[int, ...]]
) -> tuple[float, ...]:
    """Weigh each unit: its share of the parameters and its share of the operations."""
    held = [0.0] * len(operations)
    for name, parameter in model.named_parameters():
        held[owners[name][0]] += parameter.numel()
    shares = [[one / (sum(row) or 1.0) for one in row] for row in (held, operations)]
    return tuple(sum(pair) for pair in zip(*shares, strict=True))

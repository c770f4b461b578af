"""Several optimizers as one, which steps all of them, or in a turn one of them alone.

Its groups are those of the optimizers, the very same dicts, and its state is theirs: what saves, hands on or watches one
optimizer does so with all of them. In a turn the other optimizers do nothing: no momentum, no decay, no count of steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.strategies.guards.before_first_step import check_optimizer, needs_closure
from paceline.strategies.guards.trained import HasParameters
from paceline.strategies.in_turns.models import check_names


class Optimizers(Optimizer):
    """The optimizers of a run by name."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        check_names(optimizers)
        for name, one in optimizers.items():
            check_optimizer(one)
            if needs_closure(one):
                raise InputError(
                    f"the optimizer {name!r}, a {type(one).__name__}, computes the loss several times in one step, and so it "
                    "cannot take turns with others. Use one that works from gradients, or make it the only one of its run."
                )
        _check_apart(optimizers)
        self.optimizers = dict(optimizers)
        self.turn: str | None = None
        """Whose turn it is; None: all step."""
        self._made = False
        super().__init__([group for one in optimizers.values() for group in one.param_groups], {})
        self.state = _States(self.optimizers)  # type: ignore[assignment]
        self._made = True

    def __getitem__(self, name: str) -> Optimizer:
        """Return one of them."""
        return self.optimizers[name]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Hand each optimizer what was loaded of its own; torch's `load_state_dict` ends here."""
        self.param_groups = state["param_groups"]
        groups = iter(self.param_groups)
        owners: dict[Any, Optimizer] = {}
        for one in self.optimizers.values():
            for group in (next(groups) for _ in one.param_groups):
                owners.update(dict.fromkeys(group["params"], one))
        loaded: dict[int, Any] = {id(one): defaultdict(dict) for one in self.optimizers.values()}
        for key, entry in state["state"].items():
            if isinstance(key, str):
                name, _, own = key.partition("/")
                loaded[id(self.optimizers[name])][own] = entry
            else:
                loaded[id(owners[key])][key] = entry
        for one in self.optimizers.values():
            one.state = loaded[id(one)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the groups of the optimizers; none later."""
        if self._made:
            _refuse_new_group()
        super().add_param_group(param_group)

    @property
    def stepping(self) -> list[Optimizer]:
        """Those that the coming step steps."""
        return [*self.optimizers.values()] if self.turn is None else [self.optimizers[self.turn]]

    def trains(self) -> set[int]:
        """Return the ids of the parameters that the coming step updates."""
        return {id(one) for part in self.stepping for group in part.param_groups for one in group["params"]}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step the optimizer whose turn it is, or all."""
        del closure
        if sum(len(one.param_groups) for one in self.optimizers.values()) != len(self.param_groups):
            _refuse_new_group()
        for one in self.stepping:
            one.step()


class _States(MutableMapping[Any, Any]):
    """What the optimizers keep, as one mapping: by parameter; what one keeps under a name of its own, behind its own name."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._owners: dict[int, Optimizer] = {}

    def _place(self, key: Any) -> tuple[Optimizer, Any]:
        if isinstance(key, str):
            name, _, own = key.partition("/")
            return self._optimizers[name], own
        for one in self._optimizers.values():
            if key in one.state:
                return one, key
        if id(key) not in self._owners:
            self._owners = {
                id(held): one
                for one in self._optimizers.values()
                for group in one.param_groups
                for held in group["params"]
            }
        return self._owners[id(key)], key

    def __getitem__(self, key: Any) -> Any:
        one, own = self._place(key)
        if own not in one.state:
            raise KeyError(key)
        return one.state[own]

    def __setitem__(self, key: Any, value: Any) -> None:
        one, own = self._place(key)
        one.state[own] = value

    def __delitem__(self, key: Any) -> None:
        one, own = self._place(key)
        del one.state[own]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(
            [f"{name}/{key}" if isinstance(key, str) else key for key in one.state]
            for name, one in self._optimizers.items()
        )

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers.values())


class TurnPart:
    """What of a model the optimizer of a turn holds."""

    def __init__(self, model: HasParameters, optimizers: Optimizers, turn: str) -> None:
        self._model, self._optimizer = model, optimizers[turn]
        self.turn = turn

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield it in the model's order."""
        held = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
        return ((name, one) for name, one in self._model.named_parameters() if id(one) in held)


def each_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer is made of: several, or itself."""
    return [*optimizer.optimizers.values()] if isinstance(optimizer, Optimizers) else [optimizer]


def stepping(optimizer: Optimizer) -> list[Optimizer]:
    """Return those of them that the coming step steps."""
    return optimizer.stepping if isinstance(optimizer, Optimizers) else [optimizer]


def _refuse_new_group() -> None:
    raise InputError(
        "add_param_group was called in a run of several optimizers, which train what they held when they were prepared. Make "
        "all groups before run.prepare, with lr=0 or frozen at first if need be."
    )


def _check_apart(optimizers: Mapping[str, Optimizer]) -> None:
    """Raise where two optimizers hold one parameter."""
    holders: dict[Tensor, str] = {}
    for name, one in optimizers.items():
        for parameter in (held for group in one.param_groups for held in group["params"]):
            if holders.setdefault(parameter, name) != name:
                raise InputError(
                    f"the optimizers {holders[parameter]} and {name} hold the same parameter, of shape {tuple(parameter.shape)}. "
                    "Give each parameter to one of them."
                )

"""What an optimizer keeps of rows, where a loop may ask for what it keeps of a weight: that would be somebody else's entry.

`optimizer.state` is a dict that makes an entry for whoever it does not know, so `optimizer.state[weight] = {}` of a weight of
the model would clear nothing, without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import InputError

_ABSENT = object()


class RowState(defaultdict[Any, Any]):
    """The state of an optimizer by the rows of this worker, which refuses the weights that they are rows of."""

    names: dict[int, str] = {}  # noqa: RUF012  (of a copy, which refuses nothing)

    def __missing__(self, key: Any) -> Any:
        self._check(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._check(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return what is kept under a key."""
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, default: Any = _ABSENT) -> Any:
        """Take it out."""
        self._check(key)
        return super().pop(key) if default is _ABSENT else super().pop(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return it, or put something there."""
        self._check(key)
        return super().setdefault(key, default)

    def _check(self, key: object) -> bool:
        """Raise for a weight of the model; anything else is not known to be one."""
        if id(key) in self.names:
            _refuse(self.names[id(key)])
        return False


def _refuse(name: str) -> NoReturn:
    raise InputError(
        f"the loop looked up {name} in optimizer.state, but under fsdp the optimizer holds this worker's rows, and what is done "
        "under the name of the whole weight would be lost. Go through optimizer.param_groups, or optimizer.state.values(); to "
        "find the state of one weight use --strategy ddp."
    )


def guard_state(optimizers: Iterable[Optimizer], names: dict[int, str]) -> None:
    """Have the optimizers refuse these weights, given by their ids: also where another dict has been put there since."""
    for one in optimizers:
        if type(one.state) is defaultdict:
            one.state = RowState(one.state.default_factory, one.state)
        if isinstance(one.state, RowState):
            # Of this group: the weights of the one before are gone, and their ids may be others'.
            one.state.names = names


def whole_weights(pairs: Iterable[tuple[str, Tensor, Tensor]]) -> dict[int, str]:
    """Return the names of weights, each given with the weight and its rows, that are not their rows themselves, by id."""
    return {id(weight): name for name, weight, rows in pairs if weight is not rows}

"""What the options that an optimizer reads are set to, as text: NaN is NaN there, and what is set alike is no change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from paceline.state.optimizer_state import HOW
from paceline.strategies.in_turns.optimizers import each_of

_FIXED = frozenset({bool, int, float, str, type(None)})
_NEVER = object()


def read_options(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield each group, and which options its class reads: not what else was put into it, the time of a start say."""
    for one in each_of(optimizer):
        names = sorted({*one.defaults, "lr", "initial_lr", "weight_decay", "momentum"} - HOW)
        yield from ((group, names) for group in one.param_groups)


class OptionTexts:
    """The options at the last look: a value that is still the same object is not described again."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._texts: list[str] = []
        self._open: set[int] = set()
        """The places of values that may be written to."""

    def look(self, optimizer: Optimizer) -> list[str]:
        """Return a text for each option of each group; the same list where nothing was set, within a microsecond a group."""
        values: list[Any] = []
        for group, names in read_options(optimizer):
            values += map(group.get, names)
        if len(values) != len(self._values):
            self._values, self._texts, self._open = [_NEVER] * len(values), [""] * len(values), set()
        before, self._values = self._values, values
        changed = [n for n, one in enumerate(values) if one is not before[n]]
        for place in changed:
            (self._open.discard if _is_fixed(values[place]) else self._open.add)(place)
        told = {place: _told(values[place]) for place in {*changed, *self._open}}
        if any(self._texts[place] != text for place, text in told.items()):
            self._texts = [told.get(place, text) for place, text in enumerate(self._texts)]
        return self._texts


def _is_fixed(value: Any) -> bool:
    return type(value) in _FIXED or (type(value) is tuple and _FIXED.issuperset(map(type, value)))


def _told(value: Any) -> str:
    """Return what tells a value from others; one on a GPU, for which this would wait, and an object of no value tell nothing."""
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_told, value))}]"
    if isinstance(value, np.ndarray | np.generic) or (
        isinstance(value, Tensor) and value.device.type == "cpu"
    ):
        return repr(value.tolist())
    return repr(value) if isinstance(value, bool | int | float | str) else ""

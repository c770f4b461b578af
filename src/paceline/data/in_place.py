"""Finds a collate function that changes the data set's own items: whoever reads the sample later reads another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from paceline.compat.tensors import write_count
from paceline.errors import InputError

_LARGE = 1 << 20
"""Bytes of an array that is compared by its values; tensors count their writes."""


class Items:
    """What some items hold before they are collated."""

    def __init__(self, items: list[Any]) -> None:
        self._leaves = [
            (place, leaf, _state(leaf)) for place, item in enumerate(items) for leaf in _leaves(item)
        ]

    def check(self, samples: list[int], read: Callable[[int], Any]) -> None:
        """Raise where one was changed that the data set hands out a second time; those made for each reading are nobody's."""
        changed: dict[int, set[int]] = {}
        for place, leaf, before in self._leaves:
            if _state(leaf) != before:
                changed.setdefault(place, set()).add(_memory(leaf))
        for place, memories in changed.items():
            if not memories.isdisjoint(map(_memory, _leaves(read(samples[place])))):
                raise InputError(
                    f"collate changes sample {samples[place]} in place, and with it the data set's own: a later epoch, "
                    "another worker and a resumed run read other values. Work on a copy: x = x * 2 in place of x.mul_(2)."
                )


def _leaves(item: Any) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    """Yield the tensors and arrays of an item."""
    if isinstance(item, Tensor | np.ndarray):
        yield item
    elif isinstance(item, dict):
        for part in item.values():
            yield from _leaves(part)
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _leaves(part)


def _state(leaf: Tensor | np.ndarray[Any, Any]) -> int | bytes:
    if isinstance(leaf, Tensor):
        return 0 if leaf.is_inference() else write_count(leaf)
    return leaf.tobytes() if leaf.nbytes <= _LARGE and not leaf.dtype.hasobject else b""


def _memory(leaf: Tensor | np.ndarray[Any, Any]) -> int:
    return leaf.data_ptr() if isinstance(leaf, Tensor) else leaf.__array_interface__["data"][0]

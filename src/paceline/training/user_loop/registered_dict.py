"""A dict that a loop has registered: what it holds is loaded into the objects that the loop may hold as well."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.tensors import plain

REPLACED = "replaced since it was registered"
"""Where the state says which of its objects are no longer those that were registered."""
Path = tuple[Any, ...]


class RegisteredDict:
    """A dict, and which tensors, arrays, lists and dicts in it are still those that were there when it was registered.

    `ema = torch.zeros(4); run.register("ema", {"ema": ema})`: a loop that goes on with `ema.mul_(0.9)` must find in `ema`
    what is loaded. One that does `state["ema"] = new` has given its dict another tensor: the first one may be needed as it is.
    """

    def __init__(self, value: dict[Any, Any]) -> None:
        self.value = value
        self._first = dict(_objects((), value))
        self._replaced: set[Path] = set()

    def plain(self, where: str) -> Any:
        """Return what a checkpoint can hold of it."""
        state = plain(self.value, where)
        if self._look():
            state[REPLACED] = sorted(map(_told, self._replaced))
        return state

    def _look(self) -> bool:
        """Forget the objects in whose place another has come; return whether there are any."""
        if self._first:
            now = dict(_objects((), self.value))
            gone = [path for path, one in self._first.items() if now.get(path) is not one]
            for path in gone:
                del self._first[path]
            self._replaced.update(gone)
        return bool(self._replaced)

    def load(self, state: dict[Any, Any]) -> None:
        """Take over a state, in memory of its own."""
        self._look()
        state = copy.deepcopy(state)
        replaced = set(state.pop(REPLACED, ()))
        for path in [path for path in self._first if _told(path) in replaced]:
            del self._first[path]
            self._replaced.add(path)
        items = {key: self._loaded((key,), item) for key, item in state.items()}
        self.value.clear()
        self.value.update(items)
        self._look()

    def _loaded(self, path: Path, new: Any) -> Any:
        """Return the object that was registered, with the new content; or the new one, where that cannot be."""
        mine = self._first.get(path)
        if isinstance(new, dict):
            items = {key: self._loaded((*path, key), item) for key, item in new.items()}
            if not isinstance(mine, dict):
                return type(new)(items)
            mine.clear()
            mine.update(items)
            return mine
        if isinstance(new, list):
            members = [self._loaded((*path, place), item) for place, item in enumerate(new)]
            if not isinstance(mine, list):
                return members
            mine[:] = members
            return mine
        if isinstance(new, tuple):
            return tuple(self._loaded((*path, place), item) for place, item in enumerate(new))
        return mine if mine is not None and _written(mine, new) else new


def _written(mine: Any, new: Any) -> bool:
    """Write a tensor or an array into another one of its kind; return whether that could be done."""
    if not any(isinstance(mine, kind) and isinstance(new, kind) for kind in (Tensor, np.ndarray)):
        return False
    if mine.shape != new.shape or mine.dtype != new.dtype:
        return False
    try:
        with torch.no_grad():
            mine[...] = new
    except (RuntimeError, ValueError):  # it is expanded, was made in inference mode, or may only be read
        return False
    return True


def _objects(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the objects in a dict, list or tuple that can be written to, each with the way to it."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, Tensor | np.ndarray | list | dict):
            yield (*path, key), item
        if isinstance(item, dict | list | tuple):
            yield from _objects((*path, key), item)


def _told(path: Path) -> str:
    return "/".join(map(repr, path))

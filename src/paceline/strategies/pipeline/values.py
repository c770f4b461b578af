"""Follows a forward pass that looks at values of its arguments: whether anything is padded, which mask it needs.

Parameters have no values there (they lie on the meta device), the arguments have theirs. What is computed of arguments and
constants alone is computed, so that the pass decides as it does in one process; what a parameter has a part in has a shape only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.compat.dispatch import TorchDispatchMode, arguments_of, current_mode, name_of, no_modes
from paceline.compat.pytree import tree_iter, tree_map

_META = torch.device("meta")


class WithValues(TorchDispatchMode):
    """Computes what has values, and follows the shapes of the rest."""

    def __init__(self, call: Any) -> None:
        """`call` holds the arguments: what the pass makes of no tensor at all has its values on their device."""
        super().__init__()  # type: ignore[no-untyped-call]
        found = (leaf.device for leaf in tree_iter(call) if isinstance(leaf, Tensor))
        self._home = next(found, torch.device("cpu"))
        self._ended = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute one operation, or its shapes where one of its arguments has nothing else."""
        del types
        if self._ended:
            return func(*args, **(kwargs or {}))
        given = dict(kwargs or {})
        tensors = [leaf for leaf in tree_iter((args, given)) if isinstance(leaf, Tensor)]
        lacking = any(one.is_meta for one in tensors)
        if lacking and not all(one.is_meta for one in tensors):
            _check_written(func, args, given)
            args, given = without_values((args, given))
        if given.get("device") is not None:
            asked = torch.device(given["device"])
            # The device of a parameter, or of an argument: where the model is whole they are the same.
            given["device"] = _META if lacking else self._home if asked == _META else asked
        return func(*args, **given)

    def end(self) -> None:
        """Let everything be computed as it is, from inside whatever the pass has entered since."""
        self._ended = True
        self.leave()

    def leave(self) -> None:
        """Leave the mode, unless another one was entered since, which sees operations before it."""
        if current_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def has_values(call: Any) -> bool:
    """Return whether a tensor of these arguments has values."""
    return any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree_iter(call))


def without_values(value: Any) -> Any:
    """Return the same nest with tensors that have a shape and no values."""
    with no_modes():  # ours would give them values
        return tree_map(lambda leaf: leaf.detach().to(_META) if isinstance(leaf, Tensor) else leaf, value)


def made_anew(nest: Any) -> Any:
    """Return a nest with other tensors of the same shapes, without values."""

    def empty(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=_META) if isinstance(leaf, Tensor) else leaf

    with no_modes():
        return tree_map(empty, nest)


def own_values(call: Any) -> Any:
    """Return the same nest with tensors of its own, for a pass may write to its arguments."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, call)


def _check_written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise where something without values would be written to a tensor that has some."""
    for place, argument in enumerate(arguments_of(func)):
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and has_values(given):
            raise NotImplementedError(
                f"{name_of(func)} writes what a parameter has a part in, on the meta device, into a tensor with values"
            )

"""Follows what a forward pass writes into its own arguments: the loss may read them behind it, on the worker of the last stage.

What the first stage writes is handed on, and stands in the arguments of the last one when its pass ends. Behind a cut a forward
pass has stand-ins for its arguments, so what it writes there would be lost: it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from paceline.errors import InputError

Changed = Mapping[int, Tensor]
"""New values of arguments, by their place among the tensors of a call."""


class Inputs:
    """The arguments of one call of the model, as they were when it began."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._leaves, _ = tree_flatten_with_path(call)
        self._tensors = [leaf for _, leaf in self._leaves if isinstance(leaf, Tensor)]
        self._versions = [one._version for one in self._tensors]  # noqa: SLF001

    def changed(self) -> dict[int, Tensor]:
        """Return the tensors that were written to since; a container that was given other tensors is refused."""
        before = {path: leaf for path, leaf in self._leaves if isinstance(leaf, Tensor)}
        for path, leaf in tree_flatten_with_path(self._call)[0]:
            if isinstance(leaf, Tensor) and before.get(path) is not leaf:
                _refuse("puts tensors into the batch that it is given")
        pairs = zip(self._tensors, self._versions, strict=True)
        found = {place: one for place, (one, version) in enumerate(pairs) if one._version != version}  # noqa: SLF001
        if any(one.requires_grad for one in found.values()):
            _refuse("writes into an argument that takes a gradient")
        return {place: one.detach() for place, one in found.items()}

    def write(self, changed: Changed) -> None:
        """Have the arguments be what the first stage made of them."""
        with torch.no_grad():
            for place, value in changed.items():
                self._tensors[place].copy_(value)

    def check(self) -> None:
        """Raise where a stage behind the first has written to what stands in for its arguments."""
        if self.changed():
            _refuse("writes into its own arguments behind a cut of the pipeline")

    def shared_with(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return which of some tensors lie in the memory of the arguments."""
        return in_memory_of(self._tensors, tensors)


class Received:
    """What came from the stage before, and which of it lies in the memory of the model's own arguments."""

    def __init__(self, tensors: Sequence[Tensor], of_inputs: Sequence[bool]) -> None:
        self._tensors = [one for one, is_input in zip(tensors, of_inputs, strict=True) if is_input]
        self._versions = [one._version for one in self._tensors]  # noqa: SLF001

    def check(self) -> None:
        """Raise where an argument of the model was written to under another name."""
        if [one._version for one in self._tensors] != self._versions:  # noqa: SLF001
            _refuse("writes into its own arguments behind a cut of the pipeline")

    def shared_with(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return which of some tensors lie in the memory of the arguments."""
        return in_memory_of(self._tensors, tensors)


def in_memory_of(owners: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[bool]:
    """Return which tensors share memory with an owner."""
    held = {_memory(one) for one in owners}
    return [_memory(one) in held for one in tensors]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)  # noqa: SLF001


def _refuse(what: str) -> NoReturn:
    raise InputError(
        f"the model's forward pass {what}, and under pp a loss that reads the batch behind it, on another worker, would not see "
        "that. Work on a copy (x = x * 2, not x.mul_(2)), or use another strategy."
    )

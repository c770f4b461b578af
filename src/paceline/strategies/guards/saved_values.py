"""What a graph has saved for its backward pass in memory that may be written to unseen before that pass.

torch counts writes to a tensor and refuses a backward pass that would read what was written since. It counts none through
numpy: into an array that a tensor was made of, or into the memory of a tensor that `.numpy()` was called on. One process goes
back right behind each forward pass, so it never notices. A pipeline, and threads beside forward passes, go back later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from paceline.compat.autograd import all_saved
from paceline.compat.tensors import storage_key
from paceline.errors import InputError
from paceline.strategies.guards.same_values import differing_bits, parts_of

_PLAIN = (Tensor, nn.Parameter)


class Graph:
    """What lies behind some tensors.

    That of a model on a GPU is looked at, too: no array lies there, but a graph may keep a tensor of the CPU (a number that a
    loss multiplies by, indices), and memory of another library.
    """

    def __init__(self, roots: Iterable[Tensor]) -> None:
        tensors, hooked, kinds = all_saved(root.grad_fn for root in roots)
        self.runs_python = hooked or any(issubclass(kind, BackwardCFunction) for kind in kinds)
        """Whether the backward pass runs a function written in Python, or hooks of what it saved."""
        self.uncounted = [*filter(is_uncounted, tensors)]
        """What was saved in memory that others may write to without torch's count."""

    def uncounted_beyond(self, others: Iterable[Tensor]) -> bool:
        """Return whether any of that lies in other memory than some tensors do."""
        if not self.uncounted:
            return False
        known = {_memory(part) for one in others for part in parts_of(one)}
        return any(_memory(part) not in known for one in self.uncounted for part in parts_of(one))


class SavedValues:
    """Copies of tensors in such memory, from the end of a forward pass to its backward pass."""

    def __init__(self, tensors: Sequence[Tensor], weights: Iterable[Tensor]) -> None:
        """`weights` are watched elsewhere."""
        self._held: list[tuple[Tensor, Tensor]] = []
        parts = [part for one in tensors for part in parts_of(one)]
        known = {_memory(part) for one in weights for part in parts_of(one)} if parts else set()
        seen: set[Any] = set()
        for part in parts:
            place = part.data_ptr(), part.dtype, part.shape, part.stride()
            if place not in seen and _memory(part) not in known:
                seen.add(place)
                self._held.append((part, part.clone()))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have the memory hold again what it held then, and afterwards what it holds now."""
        now = [part for part, _ in self._held]
        changed = [self._held[place] for place in differing_bits(now, [then for _, then in self._held])]
        later = [(part, part.clone()) for part, _ in changed]
        _write(changed)
        try:
            yield
        finally:
            _write(later)


NOTHING = SavedValues((), ())


def is_uncounted(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory that may be written to without torch's count.

    torch lets nobody resize such memory: what it did not allocate itself, and what was handed to numpy.
    """
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return not tensor.untyped_storage().resizable()
    return any(not part.untyped_storage().resizable() for part in parts_of(tensor))


@contextmanager
def writes_refused(strategy: str, why: str) -> Iterator[None]:
    """Refuse in one line what torch finds written to in place before the backward pass that needs it."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise InputError(
            f"the forward pass or the loss writes in place to a tensor that a backward pass still needs. {why} Make a new tensor "
            f"for each batch in place of writing into one that is kept, or use a strategy other than {strategy}."
        ) from error


def _memory(part: Tensor) -> int:
    return storage_key(part.untyped_storage())


@torch.no_grad()
def _write(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for part, values in pairs:
        # Past torch's count: the graph would take it for a write that came between.
        _without_repeats(part).data.copy_(_without_repeats(values, like=part))


def _without_repeats(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the first of each row of places that are one place of memory, as `expand` makes them."""
    for side, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[side] > 1:
            tensor = tensor.narrow(side, 0, 1)
    return tensor

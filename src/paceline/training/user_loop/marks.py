"""Marks: cheap notes of what a loop's body may write to, from which it is seen later whether it has.

torch counts the writes to a tensor, and a tensor that takes another's place is another object. So two equal marks say that
nothing was written in between, but for what torch does not count (`.data`): that takes `checksum`.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.compat.modules import buffers_of, children_of, parameters_of, values_in
from paceline.compat.tensors import local_part, write_count
from paceline.strategies.guards import writes
from paceline.strategies.guards.absent import is_absent

LARGE = 1 << 20
"""Bytes from which torch's own sums are faster than one pass of Python's checksum."""


class Marks:
    """Which objects there were, and how often each of the tensors among them had been written to."""

    __slots__ = ("counts", "others", "tensors")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensors: list[Any], others: Sequence[Any] = ()) -> None:
        """`tensors` may hold what is none; `others` are known by their identity alone."""
        # The objects are held, so that no other one comes to be where they were.
        self.tensors, self.others = tensors, others
        self.counts = _counts(tensors)

    def __eq__(self, other: object) -> bool:
        """Return whether nothing was written or replaced from one to the other."""
        return self is other or (
            isinstance(other, Marks)
            and self.counts == other.counts
            and are_same(self.tensors, other.tensors)
            and are_same(self.others, other.others)
        )

    def hold(self, tensors: list[Tensor]) -> bool:
        """Return whether these tensors are those that were there, and none was written to since."""
        return are_same(tensors, self.tensors) and self.counts == _counts(tensors)

    def buffers_differ(self, later: Marks, *, but: Set[int]) -> bool:
        """Return whether a buffer was written to, replaced or taken away since; those with one of the ids `but` may be."""
        now = [
            (one, count)
            for one, count in zip(later.tensors, later.counts, strict=True)
            if id(one) not in but and not isinstance(one, nn.Parameter)
        ]
        then = {id(one): count for one, count in zip(self.tensors, self.counts, strict=True)}
        return len(self.tensors) != len(later.tensors) or any(
            then.get(id(one)) != count for one, count in now
        )


def are_same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Return whether two lists hold the same objects."""
    return len(these) == len(those) and all(map(is_, these, those))


def _counts(tensors: list[Any]) -> list[Any]:
    try:
        return list(map(write_count, tensors))
    except (AttributeError, RuntimeError):
        return list(map(_count, tensors))


def _count(one: Any) -> Any:
    if isinstance(one, Tensor):
        return 0 if one.is_inference() else write_count(one)
    if isinstance(one, dict):
        return Marks([*one.values()])
    return Marks([*one]) if isinstance(one, list | tuple | set) else 0


def slot_marks(optimizer: Optimizer) -> Marks:
    """Return marks of what an optimizer keeps of its parameters."""
    slots: list[Any] = []
    for entry in optimizer.state.values():
        if isinstance(entry, dict):
            slots += entry.values()
        else:
            slots.append(entry)
    return Marks(slots)


class ModuleMarks:
    """Where a module and those in it keep their tensors: asking these tables is a tenth of asking for parameters()."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._find()

    def _find(self) -> None:
        modules = list(self._module.modules())
        children = list(map(children_of, modules))
        tables = [table(one) for one in modules for table in _TENSORS]
        self._all = [*children, *tables]
        self._sizes = sum(map(len, self._all))
        self._children, self._tables = list(filter(None, children)), list(filter(None, tables))
        self._known = _values(self._children)
        self._some_absent = any(map(is_absent, _values(self._tables)))
        self._noted: Marks | None = None

    def note(self) -> Marks:
        """Return marks of every parameter, buffer and module that is there now."""
        # What was empty is gone through only when it no longer is.
        if sum(map(len, self._all)) != self._sizes or not are_same(self._known, _values(self._children)):
            self._find()
        tensors = [one for one in _values(self._tables) if one is not None]
        if self._some_absent:
            tensors = [one for one in tensors if not is_absent(one)]
        noted = self._noted
        if noted is None or not noted.hold(tensors):
            noted = self._noted = Marks(tensors, self._known)
        return noted


_TENSORS: tuple[Callable[[nn.Module], dict[str, Any]], ...] = (parameters_of, buffers_of)


def _values(tables: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(values_in, tables)))


class StateMarks:
    """Marks of a state that was registered: of its tensors, and of all else its value."""

    __slots__ = ("_tensors", "structure", "told")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, state: Any, *, anew: bool) -> None:
        """`anew`: the state is made anew each time it is asked for, in tensors of its own."""
        written = io.BytesIO()
        pickler = _Pickler(written)
        pickler.dump(state)
        self.structure, self._tensors = written.getvalue(), pickler.tensors
        self.told = list(map(checksum if anew else _place, pickler.tensors))

    def __eq__(self, other: object) -> bool:
        """Return whether nothing was written or replaced from one to the other."""
        return isinstance(other, StateMarks) and self.told == other.told and self.structure == other.structure


class _Pickler(pickle.Pickler):
    """Writes down what is no tensor: at the speed of C, a hundred thousand numbers in a millisecond or two."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.fast = True  # the same values give the same bytes, whichever of them are one object
        self.tensors: list[Tensor] = []

    def reducer_override(self, one: Any) -> Any:
        """Collect tensors; name what no checkpoint holds."""
        if one is str or one is dict:
            return NotImplemented  # as which what follows is written
        if isinstance(one, dict):
            return dict, (), None, None, iter(one.items())
        if isinstance(one, list | tuple | set):
            return str, (list(one),)
        if isinstance(one, np.generic | np.ndarray):
            return str, (str(one.dtype), one.shape, one.tobytes())
        if isinstance(one, Tensor):
            self.tensors.append(one)
        return str, (type(one).__name__,)


def _place(tensor: Tensor) -> Any:
    """Return where a tensor lies and how often it was written to: a detached one has the memory and the count of its own."""
    local = local_part(tensor)
    count = 0 if local.is_inference() else write_count(local)
    if local.layout is not torch.strided:
        return checksum(tensor), count
    return local.data_ptr(), tuple(local.shape), local.dtype, count


def checksum(tensor: Tensor) -> int:
    """Return a number that tells the values of a tensor here from others."""
    local = local_part(tensor).detach()
    if local.layout is not torch.strided or local.is_quantized or local.device.type == "meta":
        return 0
    if local.device.type != "cpu" or local.nbytes > LARGE:
        return writes.checksum(local)
    # In memory of its own: what has one element, or one for all, is contiguous with a stride of 0.
    raw = torch.empty(local.numel(), dtype=local.dtype).copy_(local.reshape(-1)).view(torch.uint8)
    return zlib.crc32(raw.numpy().data)  # a tenth of the time for small ones

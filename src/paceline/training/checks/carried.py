"""Follows tensors through the passes of one step: is what an earlier pass left behind computed with, and replaced from data?

A state that forward carries from batch to batch (`self.h = z.detach()`) is told in this way from a tensor that it leaves for
the loss or a log, which is replaced before anybody reads it, and from a mask made anew for longer samples, in which no data is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.compat import dynamo
from paceline.compat.tensors import no_torch_function
from paceline.task import Loss
from paceline.training.checks.findings import writes_to

_DATA = 1
"""Marks what is computed from a batch or from weights; the other bits stand for the tensors that are followed."""
_TO_PYTHON = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__"}
)
_FORM_OF_OTHER = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as", "resize_as_"})
"""Take from their second argument its type or shape alone."""
_OVERWRITING = frozenset(
    {
        *("copy_", "fill_", "zero_", "set_", "__setitem__", "index_copy_", "index_fill_", "masked_fill_"),
        *("masked_scatter_", "scatter_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"),
    }
)


class Flow(TorchFunctionMode):
    """Sees every function of torch while it is entered, and notes which results the given tensors went into."""

    def __init__(
        self, followed: Mapping[str, Tensor], *, inside: Iterable[str], known: Iterable[str] = ()
    ) -> None:
        super().__init__()
        self._known = frozenset(known)
        """Where there were tensors before the passes: a list in which others turn up has grown."""
        self._marks: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._bits = {name: 2 << place for place, name in enumerate(followed)}
        self._before = {name: (weakref.ref(one), one.shape, writes_to(one)) for name, one in followed.items()}
        self._model = sum(self._bits[name] for name in inside if name in self._bits)
        """Those that the model holds: what they reach that is differentiated counts, for a stage of a pipeline has no loss."""
        self._used = self._shown = 0
        self.active = True
        for name, one in followed.items():
            self._mark(one, self._bits[name])

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function and mark its results as what its arguments are."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.active:
            with no_torch_function():  # a tensor's own class is not asked what it is
                self._note(getattr(func, "__name__", ""), args, kwargs, result)
        return result

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if name.endswith("_like") or name.startswith("new_"):
            return  # of its arguments the form alone
        overwrites = name in _OVERWRITING
        if name in _FORM_OF_OTHER:
            args, kwargs = args[:1], {}
        read = [*args[overwrites:], *(value for key, value in kwargs.items() if key != "out")]
        marks = 0
        for one in tensors_of(read):
            marks |= self._marks_of(one) | (_DATA if one.requires_grad else 0)
        if name in _TO_PYTHON:
            self._shown |= marks
        if overwrites and args and isinstance(args[0], Tensor):
            self._mark(args[0], marks)
        elif marks:
            for one in tensors_of((result,)):
                self._mark(one, marks | self._marks_of(one))
                if one.requires_grad:
                    self._used |= marks & self._model

    def mark_batch(self, batch: Any) -> None:
        """Take the tensors of a batch for data."""
        for one in tensors_of((batch,)):
            self._mark(one, self._marks_of(one) | _DATA)

    def take_loss(self, loss: Any) -> None:
        """Note what has gone into a loss."""
        if isinstance(loss, Loss):
            for one in (loss.total, loss.weight, *loss.auxiliary.values()):
                self.take_loss(one)
        elif isinstance(loss, Tensor):
            self._used |= self._marks_of(loss)

    def carried(self, now: Mapping[str, Tensor]) -> Iterator[tuple[str, bool]]:
        """Yield what was carried on: used, then replaced from data or from itself; and whether torch saw what for."""
        grown = {
            holder_of(name)
            for name, one in now.items()
            if name not in self._known and self._marks_of(one) & _DATA
        }
        for name, bit in self._bits.items():
            if (self._used | self._shown) & bit and name in now:
                if self._renewed(name, now[name]) or holder_of(name) in grown - {""}:
                    yield name, bool(self._used & bit)
                elif self._shown & bit and now[name].numel() == 1 and self._replaced(name, now[name]):
                    yield name, False  # it went through Python, where nobody sees what becomes of it

    def _replaced(self, name: str, now: Tensor) -> bool:
        before, _, version = self._before[name]
        return before() is not now or writes_to(now) != version

    def _renewed(self, name: str, now: Tensor) -> bool:
        if not self._replaced(name, now):
            return False
        marks, shape = self._marks_of(now), self._before[name][1]
        return bool(marks & _DATA or (marks & self._bits[name] and now.shape == shape))

    def _mark(self, one: Tensor, marks: int) -> None:
        self._marks[id(one)] = weakref.ref(one), marks

    def _marks_of(self, one: Tensor) -> int:
        held = self._marks.get(id(one))
        return held[1] if held is not None and held[0]() is one else 0


def can_follow() -> bool:
    """Return whether nothing here is compiled: what is, torch would compile once more to show its functions."""
    return not dynamo.has_compiled()


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, those in lists, dicts and plain objects included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)
        elif isinstance(value, dict):
            yield from tensors_of(value.values())
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            yield from (one for one in vars(value).values() if isinstance(one, Tensor))


def holder_of(name: str) -> str:
    """Return the list or dict that something lies in, or whose length it is; an empty name where there is none."""
    if name.startswith("len("):
        return name[4:-1]
    return name.rpartition("[")[0] if name.endswith("]") else ""

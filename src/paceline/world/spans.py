"""What a step's time goes into, as spans around the code: `with spans.of[spans.DATA]:`.

Until somebody measures them (`--profile`) each is one and the same empty context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from threading import local
from typing import Any, TypeVar

Item = TypeVar("Item")
Measure = Callable[[str], AbstractContextManager[object]]

DATA, FORWARD, BACKWARD = "data", "forward", "backward"
REDUCTION = "reduction"
"""Adding gradients up: over the shards of one worker and over workers, as far as this one has work with it."""
OPTIMIZER = "optimizer"
"""From summed gradients to new weights: division, clipping, update, schedule."""
WAITING = "waiting"
"""For other workers, or for messages from them."""
SPANS = (DATA, FORWARD, BACKWARD, REDUCTION, OPTIMIZER, WAITING)

_UNMEASURED = nullcontext()
of: dict[str, AbstractContextManager[object]] = dict.fromkeys(SPANS, _UNMEASURED)
"""The context of each of them, to be entered any number of times; one inside another takes its time from that one's."""


def each(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; the time that they take to come is a span."""
    iterator = iter(items)
    while True:
        with of[name]:
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def set_measure(measure: Measure | None) -> None:
    """Have a function make the context of every span; None measures none."""
    for name in SPANS:
        of[name] = _UNMEASURED if measure is None else _Measured(measure, name)


class _Measured(AbstractContextManager[object]):
    """A span that is measured anew each time it is entered, on any thread."""

    def __init__(self, measure: Measure, name: str) -> None:
        self._measure, self._name = measure, name
        self._threads = local()

    def __enter__(self) -> object:
        made = self._measure(self._name)
        entered = made.__enter__()
        self._open().append(made)
        return entered

    def __exit__(self, *error: Any) -> bool | None:
        return self._open().pop().__exit__(*error)

    def _open(self) -> list[AbstractContextManager[object]]:
        """Return those that this thread has entered and not left, the innermost last."""
        found: list[AbstractContextManager[object]] = vars(self._threads).setdefault("open", [])
        return found

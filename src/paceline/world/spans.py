"""What a step's time goes into, as spans around the code: they cost 0.1 us until somebody measures them (`--profile`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

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

_measure: Measure | None = None
_UNMEASURED = nullcontext()


def span(name: str) -> AbstractContextManager[object]:
    """Return the context of something that time goes into; one inside another takes its time from that one's."""
    return _UNMEASURED if _measure is None else _measure(name)


def each(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; the time that they take to come is a span."""
    iterator = iter(items)
    while True:
        with span(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def set_measure(measure: Measure | None) -> None:
    """Have a function make the context of every span; None measures none."""
    global _measure  # noqa: PLW0603  (one a process, as the spans are)
    _measure = measure

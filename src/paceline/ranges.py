"""The range of every number that a user can give. nan and the infinities lie in no range. Imports no torch."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from numbers import Real
from typing import Any

from paceline.errors import InputError


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`."""

    low: float
    high: float
    whole: bool = True
    above: bool = False
    """Whether `low` itself is outside."""
    below: bool = False
    """Whether `high` itself is."""

    def read(self, name: str, value: Any) -> Any:
        """Return the number as Python's own; raise InputError, with `name` in front, if it is none of these."""
        number = self._number(value)
        if number is None:
            kind = "a whole number" if self.whole else "a number"
            raise InputError(f"{name} is {value!r}, but must be {kind}.")
        if isinstance(number, float) and not math.isfinite(number):
            raise InputError(f"{name} is {number}, but must be a number {self._words(low=True, high=True)}.")
        if number < self.low or (self.above and number == self.low):
            raise InputError(f"{name} is {_shown(number)}, but must be {self._words(low=True)}.")
        if number > self.high or (self.below and number == self.high):
            raise InputError(f"{name} is {_shown(number)}, but must be {self._words(high=True)}.")
        return number

    def _number(self, value: Any) -> int | float | None:
        if isinstance(value, bool):
            return None
        try:
            whole = operator.index(value)
        except TypeError:
            whole = None
        if self.whole or whole is not None:
            # A float cannot hold every int; what is too large for one is outside anyway.
            return whole if self.whole or whole is None or abs(whole) > 2**53 else float(whole)
        return float(value) if isinstance(value, Real) else None

    def _words(self, *, low: bool = False, high: bool = False) -> str:
        words = []
        if low:
            words.append(f"{'above' if self.above else 'at least'} {_shown(self.low)}")
        if high:
            words.append(f"{'below' if self.below else 'at most'} {_shown(self.high)}")
        return " and ".join(words)


def _shown(number: float) -> str:
    if isinstance(number, float):
        return f"{number:g}"
    return (
        str(number)
        if abs(number) < 10**30
        else f"a number of {int(number.bit_length() * 0.30103) + 1} digits"
    )


STEPS = Range(1, 10**12)
COUNT = Range(1, 10**9)
COUNT_OR_NONE = Range(0, 10**9)
WORKERS = Range(1, 1024)
THREADS = Range(1, 1024)
SHARDS = Range(1, 2**16)
SEED = Range(0, 2**63 - 1)
LOADERS = Range(0, 1024)
# What a run writes down of itself; the widths of a ledger's fields are among the bounds.
STEPS_TAKEN = Range(0, 10**12)
EPOCH = Range(0, 2**32 - 1)
GENERATION = Range(0, 2**32 - 1)
SAMPLES = Range(0, 2**63 - 1)
"""A data set without an end has the largest length that Python knows."""
HORIZON = Range(0, COUNT.high * SAMPLES.high)
PROCESSES = Range(1, 2 * WORKERS.high)
"""Workers and servers."""
MACHINE_SECONDS = Range(4, 10**6)
"""A machine that is silent for less may well be alive."""
SECONDS = Range(0, 10**7, whole=False, above=True)
PORT = Range(0, 65535)
"""0 takes a free one."""
CLIP = Range(0, 1e18, whole=False, above=True)
"""A largest norm."""


TASK: dict[str, Range] = {
    "batch_size": COUNT,
    "shards": SHARDS,
    "epochs": COUNT,
    "seed": SEED,
    "max_grad_norm": CLIP,
    "micro_batch": COUNT,
    "num_workers": LOADERS,
}
"""What the numbers among a task's attributes may be: as on the command line."""

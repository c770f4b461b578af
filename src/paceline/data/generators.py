"""Keeping the process's random generators out of the way while a dataset is read.

A dataset may draw from three: torch's CPU generator, numpy's global one and Python's `random`.
A generator of a device is left alone on purpose: reseeding it would change the dropout of the model.
"""

from __future__ import annotations

import random
from types import TracebackType

import numpy as np
import torch
from numpy.random import get_bit_generator, set_bit_generator  # type: ignore[attr-defined]  # its stubs leave them out

_TORCH = torch.default_generator


def seed_generators(value: int) -> None:
    """Seed the three generators; call it inside `GeneratorsAside`, so that it leaves no trace."""
    _TORCH.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


class GeneratorsAside:
    """Puts the generators aside for a `with` block, and tells whether the block drew from them.

    numpy's bit generator is exchanged for one of our own, because reading and writing numpy's state takes
    150 + 60 us where the exchange takes 1 us. (It drops the spare half of a pair of normal numbers, if the
    training code left one pending in numpy's legacy generator.)
    """

    def __init__(self) -> None:
        self._own, self._twin = np.random.MT19937(0), np.random.MT19937(0)

    def __enter__(self) -> GeneratorsAside:
        self._torch = _TORCH.get_state()
        self._python = random.getstate()
        self._numpy = get_bit_generator()
        set_bit_generator(self._own)
        self._untouched = False
        return self

    def drawn(self) -> bool:
        """Return whether any generator moved since the block began."""
        # The twin makes the same moves as our own generator, so they disagree once anybody else made one.
        own, twin = self._own.random_raw(4), self._twin.random_raw(4)
        self._untouched = (
            own.tobytes() == twin.tobytes()
            and random.getstate() == self._python
            and torch.equal(_TORCH.get_state(), self._torch)
        )
        return not self._untouched

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_bit_generator(self._numpy)
        if not self._untouched:
            random.setstate(self._python)
            _TORCH.set_state(self._torch)

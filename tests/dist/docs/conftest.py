"""The processes that commands of the pages are copies of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from tests.dist.docs.pages import environment
from tests.dist.docs.warm import Warm, started


@pytest.fixture(scope="session")
def warm() -> Iterator[SimpleQueue[Warm]]:
    """Keep two of them, for whoever takes one from the queue and puts it back."""
    free: SimpleQueue[Warm] = SimpleQueue()
    with started(2, environment()) as both:
        for one in both:
            free.put(one)
        yield free


@contextmanager
def borrowed(free: SimpleQueue[Warm]) -> Iterator[Warm]:
    """Take one from the queue for a while."""
    one = free.get()
    try:
        yield one
    finally:
        free.put(one)

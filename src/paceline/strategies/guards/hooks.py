"""Hooks that a task put on parameters with `register_hook`: they run on the gradient of each backward pass of each shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from paceline.compat.tensors import hooks_of


@contextmanager
def silenced(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Run no hook: for a pass of our own, which stands for no sample."""
    kept = [(hooks, dict(hooks)) for tensor in tensors if (hooks := hooks_of(tensor))]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)

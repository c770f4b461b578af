"""Hooks that a task put on parameters with `register_hook`: they run on the gradient of each backward pass of each shard."""
# ruff: noqa: SLF001  (torch has no public name for the hooks of a tensor)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where a module keeps the hooks that were put on it."""


@contextmanager
def silenced(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Run no hook: for a pass of our own, which stands for no sample."""
    kept = [(hooks, dict(hooks)) for tensor in tensors if (hooks := tensor._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def share(master: Tensor, copied: Tensor) -> None:
    """Have a copy of a parameter run the hooks of the master's."""
    copied._backward_hooks = master._backward_hooks

"""Hooks that a task put on parameters with `register_hook`: they run on the gradient of each backward pass of each shard."""
# ruff: noqa: SLF001  (torch has no public name for the hooks of a tensor)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


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


def share(master: nn.Module, copied: nn.Module) -> None:
    """Have the parameters of a copy run the hooks of the master's, whenever they were put there."""
    for theirs, mine in zip(master.parameters(), copied.parameters(), strict=True):
        if theirs._backward_hooks is not mine._backward_hooks:
            mine._backward_hooks = theirs._backward_hooks

"""Contracts with torch: what compat/ leans on, each tried with the torch that is installed.

A contract is a test that names what it tries. Where torch has changed that, it fails with the name. It needs no pytest:
`python -m tests.unit.compat` runs all of them on whichever torch is installed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

CONTRACTS: list[tuple[tuple[str, ...], Callable[[], None]]] = []
"""The names of each contract, and the contract."""


class BrokenContractError(AssertionError):
    """torch, or Python, does not do any more what compat/ leans on."""


def leans_on(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make a test the contract for these names; one that begins with a module is looked up first."""

    def contract(test: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(test)
        def tried() -> None:
            try:
                for name in names:
                    _look_up(name)
                test()
            except Exception as error:
                raise BrokenContractError(
                    f"torch {torch.__version__} has changed {', '.join(names)}: {type(error).__name__}: {error}"
                ) from error

        CONTRACTS.append((names, tried))
        return tried

    return contract


def _look_up(name: str) -> None:
    """Find a dotted name; what stands behind a colon is there on instances only, for the contract itself to find."""
    first, *rest = name.partition(":")[0].split(".")
    found: Any = importlib.import_module(first)
    path = first
    for part in rest:
        path = f"{path}.{part}"
        try:  # a module may be hidden behind a function of the same name
            found = importlib.import_module(path)
        except ImportError:
            if not hasattr(found, part):
                raise AttributeError(f"there is no {path}") from None
            found = getattr(found, part)


@contextmanager
def alone() -> Iterator[dist.ProcessGroup]:
    """Be the only worker of a group."""
    with _formed("gloo", dist.HashStore(), 1) as group:
        yield group


@contextmanager
def as_if_two() -> Iterator[dist.ProcessGroup]:
    """Be the first of two workers, whose messages reach nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with _formed("fake", FakeStore(), 2) as group:
        yield group


@contextmanager
def _formed(backend: str, store: Any, size: int) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(backend, store=store, rank=0, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()

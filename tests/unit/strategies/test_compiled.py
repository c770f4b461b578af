"""Which functions share what is compiled of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline.strategies.compiled import Compiler
from paceline.world import LocalComm, World


@dataclass
class Scaled:
    """Equal to others of its scale, and without a hash."""

    scale: float = 1.0

    def __call__(self, value: float) -> float:
        return value * self.scale

    def loss(self, value: float) -> float:
        return value * self.scale


def made(scale: float) -> Callable[[float], float]:
    return lambda value: value * scale


def plain() -> Callable[[float], float]:
    return lambda value: value * 2


def with_default(scale: float) -> Callable[..., float]:
    def loss(value: float, by: float = scale) -> float:
        return value * by

    return loss


ONE, OTHER = Scaled(), Scaled()


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (ONE, ONE, True),
        (ONE, OTHER, False),
        (ONE.loss, ONE.loss, True),
        (ONE.loss, OTHER.loss, False),
        (plain(), plain(), True),
        (made(1.0), made(2.0), False),
        (with_default(1.5), with_default(2.5), False),
    ],
    ids=["object", "equal", "method", "equal's", "made anew", "closure", "default"],
)
def test_functions_that_compute_the_same_are_compiled_once(first: Any, second: Any, same: bool) -> None:
    world = World(
        rank=0, size=1, local_rank=0, local_size=1, node_rank=0, nodes=1, device=torch.device("cpu"), backend="local",
        generation=0, host="here", comm=LocalComm(),
    )  # fmt: skip
    compiler = Compiler(world, lambda _: None, repeatable=True, in_pieces=True)
    region = compiler.of(first)
    assert compiler.of(region) is region
    assert (compiler.of(second) is region) is same

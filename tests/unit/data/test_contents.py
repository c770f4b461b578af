"""What workers compare of a stream's items: other items are told from the same ones, whatever else stands in them."""

from __future__ import annotations

import io
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from paceline.data.contents import ELEMENTS, Difference, compare, contents_of


@dataclass
class Sample:
    features: torch.Tensor
    label: int


class Named(NamedTuple):
    features: torch.Tensor
    label: int


def values(number: int) -> torch.Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(number))


def shuffled(pairs: dict[str, Any]) -> dict[str, Any]:
    order = list(pairs.items())
    random.shuffle(order)
    return dict(order)


class Picture:
    """As PIL's: an array of bytes once it is decoded, a name in a folder before that."""

    def __init__(self, number: int, *, decoded: bool = True) -> None:
        self.filename, self.tile = f"/{uuid.uuid4()}/{number}.jpg", [] if decoded else ["what to decode"]
        self._pixels = (256 * values(number)).to(torch.uint8).reshape(2, 3).numpy()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        assert not self.tile
        shown: dict[str, Any] = self._pixels.__array_interface__
        return shown


class Pointers:
    """An array of objects, which are elsewhere in each process."""

    def __init__(self) -> None:
        self._objects = np.array([object()])

    @property
    def __array_interface__(self) -> dict[str, Any]:
        shown: dict[str, Any] = self._objects.__array_interface__
        return shown


KINDS: dict[str, Callable[[int], Any]] = {
    "tensor": values,
    "pair": lambda number: (values(number), number % 2),
    "dict": lambda number: shuffled({"x": values(number), "y": number % 2, "mask": torch.ones(6)}),
    "numpy": lambda number: {"x": values(number).numpy(), "y": np.int64(number % 2)},
    "text": lambda number: f"line {number}",
    "path": lambda number: f"/{uuid.uuid4()}/{number}.jpg",
    "number": lambda number: number,
    "tokens": lambda number: {"ids": [number + place for place in range(40)]},
    "dataclass": lambda number: Sample(values(number), number % 2),
    "named": lambda number: Named(values(number), number % 2),
    "picture": lambda number: (Picture(number), Picture(number)),
    "picture and a random name": lambda number: {"x": Picture(number), "name": str(uuid.uuid4())[:3]},
    "picture not decoded": lambda number: {"jpg": Picture(number, decoded=False)},
    "half": lambda number: values(number).to(torch.bfloat16),
    "complex": lambda number: torch.complex(values(number), values(number)).conj(),
    "bool": lambda number: values(number).repeat(8) > 0,
    "large": lambda number: torch.arange(3 * ELEMENTS + 1) + number,
    "strided": lambda number: values(number).reshape(2, 3).T,
    "beside": lambda number: {
        "x": values(number),
        "read": time.perf_counter(),
        "object": object(),
        "file": io.BytesIO(),
        "set": {str(uuid.uuid4()), "a"},
        "array": np.array([object()]),
        "sparse": torch.eye(2).to_sparse(),
        3: "a key that is no string",
    },
}


def contents(make: Callable[[int], Any], numbers: range) -> str:
    found = contents_of([make(number) for number in numbers])
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_items_are_the_same_and_others_are_not(kind: str) -> None:
    make = KINDS[kind]
    mine = contents(make, range(10))
    assert compare(mine, contents(make, range(10))) is None
    for others in (range(1, 11), range(0, 20, 2), range(100, 110)):  # after, each second, a part further on
        assert compare(mine, contents(make, others)) is not None


def test_the_largest_difference_is_shown_as_it_begins() -> None:
    mine, theirs = (
        contents(lambda number: (torch.full((4,), number / 2), number), range(first, 4)) for first in (0, 1)
    )
    assert compare(mine, theirs) == Difference("item[0]", "[0, 0, 0, ...]", "[0.5, 0.5, 0.5, ...]")


def test_items_counted_behind_a_split_differ_though_their_numbers_do_not() -> None:
    mine, theirs = (
        contents_of([(count, values(number)) for count, number in enumerate(range(first, 20, 2))])
        for first in (0, 1)
    )
    assert mine is not None
    assert theirs is not None
    assert compare(mine, theirs) is not None


def test_items_of_other_keys_differ() -> None:
    assert compare(contents(lambda _: {"a": 1}, range(3)), contents(lambda _: {"b": 1}, range(3))) is not None


@pytest.mark.parametrize("batch", [[], [1], [object(), object()], [{}, {}], [Pointers(), Pointers()]])
def test_what_cannot_be_compared_is_passed_over(batch: list[Any]) -> None:
    assert contents_of(batch) is None


def test_an_item_that_refuses_to_be_looked_at_is_passed_over() -> None:
    class Shy(dict[str, int]):
        def __getitem__(self, key: str) -> int:
            raise LookupError(key)

    assert contents_of([Shy(a=1), Shy(a=2)]) is None


def test_looking_draws_nothing_and_changes_nothing() -> None:
    before = torch.get_rng_state()
    item = values(1)
    contents_of([item, item])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(item, values(1))

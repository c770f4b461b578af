"""A digest is equal exactly where the bits are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.verify.proof import digests


@dataclass
class Batch:
    x: torch.Tensor
    name: str


@given(st.lists(st.floats(width=32), min_size=1), st.lists(st.floats(width=32), min_size=1))
def test_equal_bits_and_no_others(left: list[float], right: list[float]) -> None:
    one, other = np.float32(left), np.float32(right)
    same = one.tobytes() == other.tobytes()
    assert (digests.of_tensor(torch.from_numpy(one)) == digests.of_tensor(torch.from_numpy(other))) is same


def test_the_sign_of_a_zero_counts_in_weights_and_not_in_gradients() -> None:
    plus, minus = {"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([-0.0, 1.0])}
    assert digests.of_named(plus.items()) != digests.of_named(minus.items())
    assert digests.of_values(plus.items()) == digests.of_values(minus.items())
    one, other = ({"w": torch.tensor([complex(zero, zero)])} for zero in (0.0, -0.0))
    assert digests.of_values(one.items()) == digests.of_values(other.items())


@pytest.mark.parametrize(
    "other",
    [
        [torch.zeros(2), [1]],
        (torch.zeros(2, dtype=torch.float64), [1]),
        (torch.zeros(2, 1), [1]),
        (torch.zeros(2), [2]),
        (torch.zeros(2), [1], []),
        (torch.zeros(2), "1"),
    ],
)
def test_what_a_batch_is_made_of(other: object) -> None:
    batch = (torch.zeros(2), [1])
    same = isinstance(other, list)  # a list and a tuple of the same parts are the same batch
    assert (digests.of_batch(batch) == digests.of_batch(other)) is same


def test_batches_of_many_kinds() -> None:
    batch = {"x": np.arange(3), "more": Batch(torch.ones(1), "a"), "none": None}
    assert digests.of_batch(batch) == digests.of_batch({**batch, "x": np.arange(3)})
    assert digests.of_batch(batch) != digests.of_batch({**batch, "x": np.arange(3) + 1})
    assert digests.of_batch(batch) != digests.of_batch({**batch, "more": Batch(torch.ones(1), "b")})


def test_the_optimizer_s_state_by_parameter_and_key() -> None:
    state = {"state": {"a.weight": {"step": 3, "momentum": torch.zeros(2)}}, "groups": []}
    assert set(digests.of_optimizer(state)) == {"a.weight: step", "a.weight: momentum"}

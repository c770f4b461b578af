"""The fingerprint of weights sees every bit, and nothing else."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import weights_sha256
from paceline.errors import CheckpointError

BASE = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[True, False]])}


def test_what_is_hashed_never_changes() -> None:
    """Receipts of different versions are compared, so what is hashed is part of the format."""
    by_hand = hashlib.sha256(
        b'["a", "torch.float32", [2]]' + struct.pack("<2f", 1, 2) + b'["b", "torch.bool", [1, 2]]' + b"\1\0"
    )
    assert weights_sha256(BASE) == by_hand.hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([1.0, 2.0]), "c": torch.tensor([[True, False]])},
        {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([True, False])},
        {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[1, 0]], dtype=torch.uint8)},
        {"a": torch.tensor([1.0, 2.0000002]), "b": torch.tensor([[True, False]])},
        {"a": torch.tensor([1.0, 2.0])},
    ],
)
def test_any_difference_shows(other: dict[str, torch.Tensor]) -> None:
    assert weights_sha256(other) != weights_sha256(BASE)


def test_order_layout_and_gradients_do_not_matter() -> None:
    square = torch.randn(3, 3)
    transposed_twice = square.t().contiguous().t()
    assert not transposed_twice.is_contiguous()
    assert weights_sha256({"x": square, "y": square}) == weights_sha256(
        {"y": torch.nn.Parameter(square), "x": transposed_twice}
    )


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from(
        [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8]
    ),
    shape=st.lists(st.integers(0, 3), max_size=3),
)
def test_every_type_and_shape_can_be_hashed(dtype: torch.dtype, shape: list[int]) -> None:
    tensor = torch.ones(shape).to(dtype)
    assert weights_sha256({"x": tensor}) == weights_sha256({"x": tensor.clone()})
    if tensor.numel():
        assert weights_sha256({"x": tensor}) != weights_sha256({"x": torch.zeros_like(tensor)})
    else:
        assert weights_sha256({"x": tensor}) != weights_sha256({"x": tensor.unsqueeze(0)})


def test_there_is_no_fingerprint_of_nothing() -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        weights_sha256({})

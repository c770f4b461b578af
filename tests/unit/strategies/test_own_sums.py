"""Memory for summed gradients: written to again where nobody has kept any of it, left alone where somebody has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.strategies.data_parallel.own_sums import SMALL, OwnSums

KEPT: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda one: one,
    "a view": lambda one: one.view(-1)[1:],
    "detached": lambda one: one.detach(),
    "numpy": lambda one: one.numpy(),
    "saved": lambda one: torch.ones_like(one, requires_grad=True) * one,
    "storage": lambda one: one.untyped_storage(),
    "dlpack": torch.utils.dlpack.to_dlpack,
    "share": lambda one: one.share_memory_(),
}
SIZE = SMALL  # larger than what is copied


def summed(sums: OwnSums, bucket: Tensor, value: float) -> Tensor:
    """Have a total of one value for a parameter in the midst of a bucket."""
    sums.begin()
    sums.target(0, bucket).fill_(value)
    total = sums.total(bucket[2:-2].view(2, -1))
    assert total is not None
    return total


def is_all(tensor: Tensor, value: float) -> bool:
    return bool((tensor == value).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_nobody_has_kept_is_written_to_again(dtype: torch.dtype) -> None:
    sums, bucket = OwnSums(), torch.zeros(SIZE, dtype=dtype)
    first = summed(sums, bucket, 1.0)
    assert is_all(first, 1.0)
    place, count = first.data_ptr(), first._version
    del first
    again = summed(sums, bucket, 2.0)
    assert again.data_ptr() == place
    assert is_all(again, 2.0)
    assert is_all(bucket, 0.0)
    assert again._version == count  # and not that of the one before, or of the memory


@pytest.mark.parametrize("how", KEPT)
def test_what_is_kept_of_it_stays(how: str) -> None:
    sums, bucket = OwnSums(), torch.zeros(SIZE)
    first = summed(sums, bucket, 1.0)
    kept = KEPT[how](first)
    place = first.data_ptr()
    del first
    second = summed(sums, bucket, 2.0)
    assert second.data_ptr() != place
    assert is_all(second, 2.0)
    del kept, second
    assert is_all(summed(sums, bucket, 3.0), 3.0)


def test_memory_that_was_moved_is_given_up() -> None:
    sums, bucket = OwnSums(), torch.zeros(SIZE)
    summed(sums, bucket, 1.0).share_memory_()
    assert is_all(summed(sums, bucket, 2.0), 2.0)


def test_a_small_gradient_does_not_keep_its_bucket() -> None:
    sums, bucket = OwnSums(), torch.zeros(SIZE)
    sums.begin()
    sums.target(0, bucket).fill_(1.0)
    small = sums.total(bucket[2:8])
    assert small is not None
    assert small.tolist() == [1.0] * 6
    assert small.untyped_storage().nbytes() == small.nbytes


def test_a_gradient_that_lies_elsewhere_is_not_here() -> None:
    sums, bucket = OwnSums(), torch.zeros(10)
    sums.begin()
    sums.target(0, bucket)
    assert sums.total(torch.ones(3)) is None


def test_a_complex_gradient_lies_in_a_bucket_of_real_numbers() -> None:
    sums, bucket = OwnSums(), torch.zeros(10)
    sums.begin()
    sums.target(0, bucket).copy_(torch.arange(10.0))
    gradient = torch.view_as_complex(bucket.view(-1, 2))[1:3]
    total = sums.total(gradient)
    assert total is not None
    assert total.tolist() == [2 + 3j, 4 + 5j]

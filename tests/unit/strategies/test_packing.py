"""Gradients in flat tensors come out as torch lays gradients out, for a norm adds in that order."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.reduce.packing import Packing, dense_strides, memory_shape

LAST = torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last)
CASES = [
    LAST,
    torch.randn(5, 3).t(),
    torch.randn(6, 6)[::2, ::2],
    torch.randn(2, 3, dtype=torch.complex64).t(),
    torch.randn(0, 4),
    torch.tensor(1.5),
    torch.randn(3, 1).t(),
]


def test_what_is_packed_comes_out_with_the_same_values_in_the_order_of_a_gradient() -> None:
    packing = Packing(CASES)
    found = packing.unpack(packing.pack(list(CASES)), [False] * len(CASES))
    for case, one in zip(CASES, found, strict=True):
        assert one is not None
        assert torch.equal(one, case)
        assert _order(one) == _order(_gradient(case))


def test_strides_are_those_that_autograd_gives() -> None:
    for case in CASES:
        made = torch.empty_strided(case.shape, dense_strides(case), dtype=case.dtype)
        assert _order(made) == _order(_gradient(case))
    assert memory_shape(LAST) == (4, 3, 3, 2)
    assert memory_shape(torch.randn(5, 3).t()) == (5, 3)


def _gradient(case: Tensor) -> Tensor:
    parameter = torch.nn.Parameter(case)
    parameter.abs().square().sum().backward()
    assert parameter.grad is not None
    return parameter.grad


def _order(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]

"""The rules that make one value of what the shards made of a buffer, for every type of numbers."""

from __future__ import annotations

import itertools

import pytest
import torch

from paceline.errors import InputError
from paceline.strategies.buffers.buffers import RULES, Buffers

MOST = {dtype: torch.iinfo(dtype).max for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)}  # fmt: skip
HELD = {
    **{dtype: [most, most - 1, most // 2, 1, 0] for dtype, most in MOST.items()},
    torch.float16: [60000.0, -60000.0, 1.0, 0.0, float("inf")],
    torch.bfloat16: [257.0, -(2.0**90), 1.0, 0.0, float("inf")],
    torch.float32: [2.0**21 - 1, 2.0**90, 1.0, 0.0, float("inf")],
    torch.float64: [2.0**51 - 1, 2.0**900, 1.0, 0.0, float("inf")],
    torch.complex64: [1 + 2j, 3 - 4e9j, 0, 1, 2],
    torch.bool: [True, False, True, False, True],
    torch.float8_e4m3fn: [1.5, -448.0, 0.0, 1.0, 2.0],
    torch.uint16: [65535, 1, 0, 2, 3],
}


@pytest.mark.parametrize("dtype", HELD)
@pytest.mark.parametrize("shards", [2, 3, 8])
def test_the_mean_of_equal_values_is_that_value(dtype: torch.dtype, shards: int) -> None:
    held = torch.tensor(HELD[dtype]).to(dtype)
    found = RULES["mean"](held, [held.clone() for _ in range(shards)])
    assert found.dtype == dtype
    assert found.tolist() == held.tolist()


def test_a_mean_of_whole_numbers_is_cut_off_towards_zero() -> None:
    for parts in itertools.product((-7, -1, 0, 2, 5), repeat=3):
        values = [torch.tensor([part, 2**60 + part, part - 2**60]) for part in parts]
        total = sum(parts)
        wanted = [int(total / 3), (3 * 2**60 + total) // 3, -((3 * 2**60 - total) // 3)]
        assert RULES["mean"](values[0], values).tolist() == wanted


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("sum", torch.bool),
        ("sum", torch.uint16),
        ("sum", torch.float8_e5m2),
        ("max", torch.complex64),
        ("min", torch.uint64),
        ("max", torch.float8_e4m3fn),
    ],
)
def test_a_rule_that_a_type_has_no_arithmetic_for_is_refused(rule: str, dtype: torch.dtype) -> None:
    model = torch.nn.Module()
    model.register_buffer("held", torch.tensor([1, 0]).to(dtype))
    buffers = Buffers(model, {"held": rule}, shards=2)
    buffers.begin()
    for shard in range(2):
        buffers.close_shard(shard, model, buffers.open_shard(model))
    short = str(dtype).removeprefix("torch.")
    with pytest.raises(
        InputError, match=rf"^the buffer held is of the type {short}, and torch has no {rule} of it"
    ):
        buffers.combine(lambda names: names, lambda rows: rows)

"""Numbers that stand for values: other values, and the same ones elsewhere, have others."""

import pytest
import torch
from torch import Tensor, nn

from paceline.strategies.buffers.unsaved import moved_unsaved, note_unsaved
from paceline.strategies.guards.writes import checksum, differing, sums_of

LENGTHS = [2, 7, 4096, 4097, 20_000]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_rearrangement_is_seen(length: int) -> None:
    seen = torch.Generator().manual_seed(length)
    values = torch.randperm(length, generator=seen).float()
    swapped = values.clone()
    swapped[[0, -1]] = values[[-1, 0]]
    kinds: list[Tensor] = [
        values.roll(1),
        values.flip(0),
        swapped,
        values.roll(4096) if length > 4097 else values.roll(-1),
    ]
    for other in kinds:
        assert torch.equal(other, values) or checksum(other) != checksum(values)
        if not torch.equal(other, values):
            assert differing(sums_of([values]), sums_of([other])) == [0]
    assert checksum(values.clone()) == checksum(values)
    assert checksum(values.view(-1, 1).expand(-1, 2)[:, 0]) == checksum(values)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_every_number_counts_and_where_it_is(dtype: torch.dtype) -> None:
    length = 5 * 4096 * 8 + 3
    values = (torch.arange(length) * 7919 % 251).to(dtype)
    before = checksum(values)
    for place in (0, 1, 63, 64, 4095, 4096, 5 * 4096, length - 1):
        other = values.clone()
        other[place] += 1
        assert checksum(other) != before
    for apart in (1, 8, 64, 512, 4096, 8 * 4096):
        other = values.clone()
        other[[5, 5 + apart]] = values[[5 + apart, 5]]
        assert (checksum(other) == before) == torch.equal(other, values)
    assert checksum(values[3:]) == checksum(values[3:].clone())  # wherever it begins in its memory


def test_a_buffer_that_no_state_dict_holds_and_that_only_rolls_has_moved() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("order", torch.arange(4), persistent=False)
    note_unsaved(model)
    assert moved_unsaved(model) == {}
    model.order.copy_(model.order.roll(1))
    assert moved_unsaved(model)["order"].tolist() == [3, 0, 1, 2]

"""Norms of gradients: one answer wherever a gradient lies, and torch's own on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.reduce.norms import norms, norms_by_chunk, total_norm

SHAPES = [(3,), (17, 5), (64, 9), (1,), (0,), (130,)]


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


@pytest.mark.parametrize("types", [(torch.float32,), (torch.bfloat16, torch.float32, torch.float64)])
def test_on_a_cpu_the_norm_is_torchs_to_the_bit(types: tuple[torch.dtype, ...]) -> None:
    gradients = [one.to(types[place % len(types)]) for place, one in enumerate(drawn(*SHAPES))]
    made = total_norm(norms(gradients), [one.dtype for one in gradients])
    expected = torch.nn.utils.get_total_norm(gradients)
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=lambda one: str(one)[6:]
)
def test_chunks_cover_every_number_once_wherever_a_gradient_begins(dtype: torch.dtype) -> None:
    gradients = drawn(*SHAPES, dtype=dtype)
    exact = [torch.linalg.vector_norm(one.to(torch.complex128)) for one in gradients]
    found: list[list[Tensor]] = []
    for offset in range(20):
        # Side by side in one stretch of memory, as in a bucket: most begin at no round address.
        room = torch.zeros(offset + sum(one.numel() for one in gradients), dtype=dtype)
        sizes = [one.numel() for one in gradients]
        views = [
            part.view(one.shape).copy_(one)
            for part, one in zip(room[offset:].split(sizes), gradients, strict=True)
        ]
        found.append(norms_by_chunk(views, chunk=32))
    for made in found:
        assert all(map(torch.equal, made, found[0]))
        for one, expected in zip(made, exact, strict=True):
            assert one.dtype == dtype.to_real()
            torch.testing.assert_close(
                one.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=0
            )


def test_other_layouts_are_measured_in_the_order_of_memory() -> None:
    (values,) = drawn((4, 6, 5, 3))
    expected = torch.linalg.vector_norm(values.double()).float()
    layouts = [
        values.to(memory_format=torch.channels_last),
        values.permute(3, 1, 0, 2),
        values[:, ::2],
        values[0].expand(2, 6, 5, 3),
    ]
    for one, found in zip(layouts, norms_by_chunk(layouts, chunk=50), strict=True):
        torch.testing.assert_close(found, torch.linalg.vector_norm(one.double()).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(norms_by_chunk(layouts)[0], expected, rtol=1e-6, atol=0)


def test_a_gradient_that_is_no_number_keeps_its_norm_from_being_one() -> None:
    gradients = drawn((40,), (40,))
    gradients[0][33], gradients[1][7] = float("nan"), float("inf")
    found = norms_by_chunk(gradients, chunk=16)
    assert found[0].isnan()
    assert found[1].isinf()

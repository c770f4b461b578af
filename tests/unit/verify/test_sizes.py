"""Rounding passes the bound of a numeric promise, and one lost sample does not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from paceline.verify.bounds import bound
from paceline.verify.sizes import measure, of_tensor, whole


def gradient(samples: int) -> torch.Tensor:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    return x[:samples].mean(0) + 0.1


def test_the_bound_grows_by_as_much_with_every_step() -> None:
    assert bound(0, "fp32") == pytest.approx(1e-5)
    assert bound(19, "fp32") == pytest.approx(1.05e-4)
    assert bound(19, "bf16") == pytest.approx(200 * bound(19, "fp32"))


def test_another_order_of_additions_is_within_it_and_a_lost_sample_is_not() -> None:
    whole_batch, halves = gradient(64), gradient(64) * (1 + 2**-22)
    rounded = whole(0, "gradient", {"w": whole_batch}, {"w": halves})
    lost = whole(0, "gradient", {"w": whole_batch}, {"w": gradient(63)})
    assert rounded is not None
    assert lost is not None
    assert 0 < rounded.relative < bound(0, "fp32") < 100 * bound(0, "fp32") < lost.relative


def test_the_same_values_have_no_size() -> None:
    assert whole(0, "weight", {"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])}) is None


@pytest.mark.parametrize("other", [{}, {"w": torch.ones(3)}, {"w": torch.tensor([1.0, math.nan])}])
def test_what_cannot_be_compared_is_infinitely_apart(other: dict[str, torch.Tensor]) -> None:
    size = whole(0, "weight", {"w": torch.ones(2)}, other)
    assert size is not None
    assert math.isinf(size.relative)


def test_dumps_are_compared_kind_by_kind(tmp_path: Path) -> None:
    def dump(name: str, weight: float, loss: float) -> Path:
        tensors = {"gradient": {}, "weight": {"a": torch.ones(2), "b": torch.tensor([weight])}, "buffer": {}}
        torch.save({**tensors, "loss": loss}, tmp_path / name)
        return tmp_path / name

    one, other = dump("one", 2.0, 1.0), dump("other", 2.5, 1.5)
    weight, loss = measure(3, one, other)
    assert (weight.kind, weight.name, weight.absolute) == ("weight", "b", 0.5)
    assert weight.relative == pytest.approx(0.5 / math.sqrt(6))
    assert (loss.kind, loss.relative) == ("loss", 0.5)
    exact = of_tensor(3, "weight", "b", one, other)
    assert exact is not None
    assert exact.relative == 0.25
    assert of_tensor(3, "data", "b", one, other) is None

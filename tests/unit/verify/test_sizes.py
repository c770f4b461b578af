"""Rounding passes the bound of a numeric promise, and one lost sample does not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from paceline.verify.proof.bounds import bound
from paceline.verify.proof.sizes import measure, of_tensor, whole


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


def size_of(mine: torch.Tensor, theirs: torch.Tensor, kind: str = "buffer") -> float | None:
    size = whole(0, kind, {"w": mine}, {"w": theirs})
    return None if size is None else size.relative


@pytest.mark.parametrize(
    "value",
    [
        torch.full((2, 2), -math.inf),  # the causal mask of a frozen backbone
        torch.tensor([math.nan, 1.0]),
        torch.zeros(3),
        torch.empty(0, 4),
        torch.tensor(5),
        torch.tensor([True, False]),
        torch.tensor([2**62 + 1]),
        torch.tensor([1 + 2j, complex(0, -0.0)]),
        torch.tensor(1.0, dtype=torch.bfloat16),
    ],
)
def test_what_is_the_same_has_no_size_whatever_it_is_made_of(value: torch.Tensor) -> None:
    assert size_of(value, value.clone()) is None
    # Beside something that differs, it adds nothing and hides nothing.
    size = whole(
        0,
        "buffer",
        {"same": value, "w": torch.tensor([3.0, 4.0])},
        {"same": value.clone(), "w": torch.tensor([3.0, 4.5])},
    )
    assert size is not None
    assert size.name == "w"
    assert 0.05 < size.relative <= 0.1


@pytest.mark.parametrize(
    ("mine", "theirs", "relative"),
    [
        (torch.tensor([-math.inf, 3.0]), torch.tensor([-math.inf, 6.0]), 1.0),
        (torch.tensor([-math.inf, 3.0]), torch.tensor([math.inf, 3.0]), math.inf),
        (torch.tensor([math.nan, 3.0]), torch.tensor([0.0, 3.0]), math.inf),
        (torch.tensor([0.0]), torch.tensor([1e-30]), math.inf),
        # Whole numbers and truth values are never rounded.
        (torch.tensor([True, True, True, True]), torch.tensor([True, True, True, False]), math.inf),
        (torch.tensor([10**6]), torch.tensor([10**6 + 1]), math.inf),
        (torch.tensor([2**62]), torch.tensor([2**62 + 1]), math.inf),
        (torch.tensor([3 + 4j]), torch.tensor([3 + 9j]), 1.0),
        (torch.tensor([1.0]), torch.tensor([1]), math.inf),
        (torch.tensor([1.0 + 0j]), torch.tensor([1.0]), math.inf),
    ],
)
def test_differences_of_every_kind_of_number(
    mine: torch.Tensor, theirs: torch.Tensor, relative: float
) -> None:
    assert size_of(mine, theirs) == pytest.approx(relative)


def test_no_gradient_is_as_far_from_a_zero_one_as_zero() -> None:
    trained = {"head": torch.tensor([3.0, 4.0])}
    zeros = {**trained, "frozen": torch.zeros(4)}
    assert whole(0, "gradient", trained, zeros) is None
    assert whole(0, "gradient", zeros, trained) is None
    moved = whole(0, "gradient", trained, {**trained, "frozen": torch.tensor([5.0])})
    assert moved is not None
    assert (moved.name, moved.relative) == ("frozen", 1.0)


def test_two_losses_that_are_not_numbers_are_the_same_loss(tmp_path: Path) -> None:
    def dump(name: str, loss: float) -> Path:
        torch.save({"gradient": {}, "weight": {}, "buffer": {}, "loss": loss}, tmp_path / name)
        return tmp_path / name

    assert measure(0, dump("a", math.nan), dump("b", math.nan)) == []
    (size,) = measure(0, dump("a", 0.0), dump("b", math.nan))
    assert math.isinf(size.relative)

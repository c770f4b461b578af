"""One line says why a checkpoint does not fit a model."""

from __future__ import annotations

import pytest
import torch

from paceline.checkpoint.compare import check_fits, same
from paceline.errors import CheckpointError


def test_what_fits_passes() -> None:
    check_fits({"a": torch.zeros(2)}, {"a": torch.ones(2, dtype=torch.float64)})


def test_each_kind_is_named_in_one_line() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_fits(
            {"a": torch.zeros(2), "b": torch.zeros(3, 4), "new": torch.tensor(1)},
            {"a": torch.zeros(2), "b": torch.zeros(4, 3), "old": torch.tensor(1)},
        )
    assert str(caught.value) == (
        "the checkpoint belongs to another model: missing new, unexpected old, "
        "shape of b is (4, 3) there and (3, 4) here. "
        "Use the model it was saved from, with all that its loop put in later, or start without it."
    )


def test_long_lists_are_cut() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_fits({f"n{index}": torch.zeros(1) for index in range(7)}, {})
    assert "missing n0, n1, n2, n3, n4 and 2 more." in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        check_fits(
            {f"n{index}": torch.zeros(1) for index in range(6)},
            {f"n{index}": torch.zeros(2) for index in range(6)},
        )
    assert str(caught.value).count("shape of") == 5
    assert "and 1 more" in str(caught.value)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1]), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.tensor(1.0), 1.0, False),
        ({"a": [1, (2.0, None)]}, {"a": [1, (2.0, None)]}, True),
        ({"a": [1]}, {"a": [1, 2]}, False),
        ({"a": 1}, {"b": 1}, False),
        (float("nan"), float("nan"), True),
    ],
)
def test_same_is_equal_to_the_bit(left: object, right: object, equal: bool) -> None:
    assert same(left, right) is equal

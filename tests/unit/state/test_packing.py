"""Neighbours go together as far as their bytes allow."""

from __future__ import annotations

import pytest

from paceline.state.packing import bunches


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([0, 4, 6, 1], [[0, 4, 6], [1]]),  # an empty tensor first
        ([11, 0, 10, 1], [[11], [0, 10], [1]]),  # one that is larger than all of them may be comes alone
        ([5, 5, 5], [[5, 5], [5]]),
    ],
)
def test_bunches_hold_no_more_than_they_may(sizes: list[int], expected: list[list[int]]) -> None:
    assert list(bunches(sizes, lambda size: size, 10)) == expected

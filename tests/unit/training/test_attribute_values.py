"""What attributes hold is compared by copies, and handed on as an equal value."""

import math

import pytest
import torch

from paceline.training.attribute_values import copied, held_back, opened, same


def scaled(factor):
    """Return functions that differ in a value alone."""
    return lambda made: made * factor


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.0, None, {"b", "c"}], 3: (True, "x")},
        torch.float16,
        torch.tanh,
        math.sin,
        torch.nn.functional.relu,
        torch.nn.Tanh,
        [scaled, frozenset({1})],
    ],
)
def test_a_value_comes_out_as_it_went_in(value):
    (copy,) = copied(value)
    assert opened(copy) == value
    assert held_back(copy) is None
    assert opened(copy) is not value or not isinstance(value, list | dict)


def test_a_table_that_is_written_to_differs_from_what_was_copied():
    table = {"a": [1.0]}
    (before,) = copied(table)
    table["a"][0] = 1
    assert not same(before, copied(table)[0])


def test_what_was_made_inside_of_a_function_is_known_and_not_handed_on():
    (one,), (equal,), (other,) = copied([scaled(2)]), copied([scaled(2)]), copied([scaled(3)])
    assert same(one, equal)
    assert not same(one, other)
    assert held_back(one).name.endswith("scaled.<locals>.<lambda>")
    assert held_back(copied({"log": [].append})[0]) is not None


@pytest.mark.parametrize(
    "value",
    [torch.ones(2000), torch.ones(2, requires_grad=True), {"a": object()}, list(range(2000)), {object(): 1}],
)
def test_other_things_are_not_looked_at(value):
    assert copied(value) is None

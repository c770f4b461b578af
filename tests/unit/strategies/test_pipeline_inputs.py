"""What a forward pass did to its arguments, told from what they hold before and behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import InputError
from paceline.strategies.pipeline.inputs import InputComparison, Inputs, Received


class ChunkBounds:
    """What torch takes for one thing."""

    def __init__(self) -> None:
        self.tensor, self.words, self.array = torch.ones(2), {"a"}, np.zeros(2)


def call() -> dict[str, Any]:
    return {
        "x": torch.tensor([1.0, float("nan")]),
        "y": torch.eye(2).to_sparse(),
        "z": torch.ones(2, 2, dtype=torch.complex64).mT.conj(),
        "n": 1.0,
        "list": [1],
        "box": ChunkBounds(),
    }


def assign(given: dict[str, Any]) -> None:
    given["x"].data = given["x"].data * 2


@pytest.mark.parametrize(
    ("write", "place", "moved"),
    [
        (lambda given: given["x"].mul_(2), 0, False),
        (lambda given: given["x"].data.mul_(2), 0, False),
        (lambda given: given["x"].numpy().__setitem__(0, 5), 0, False),
        (lambda given: given["x"].data.neg_(), 0, False),
        (assign, 0, True),
        (lambda given: given["z"].data.mul_(2), 2, False),
        (lambda given: given["box"].tensor.data.mul_(2), 3, False),
    ],
)
def test_tensors_that_were_written_to_stand_in_the_arguments_of_the_last_stage(
    write: Callable[[Any], Any], place: int, moved: bool
) -> None:
    here, there = call(), call()
    inputs = Inputs(((here,), {}), InputComparison(), objects=True)
    write(here)
    changed = inputs.changed()
    assert {where: one[1] for where, one in changed.items()} == {place: moved}
    last = Inputs(((there,), {}), objects=True)
    last.write(changed)
    for one, other in ((here["x"], there["x"]), (here["z"], there["z"])):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    assert torch.equal(here["box"].tensor, there["box"].tensor)


@pytest.mark.parametrize(
    "write",
    [
        lambda given: given.update(n=2.0),
        lambda given: given["list"].append(1),
        lambda given: given["list"].clear(),
        lambda given: given.pop("x"),
        lambda given: given.update(x=given["x"] * 1),
        lambda given: given.update(more=None),
        lambda given: given["box"].words.add("b"),
        lambda given: given["box"].array.fill(1),
        lambda given: setattr(given["box"], "tensor", torch.ones(2)),
        lambda given: setattr(given["box"], "more", 1),
        lambda given: given["y"].mul_(2),
    ],
)
def test_what_cannot_be_handed_on_is_refused(write: Callable[[Any], Any]) -> None:
    given = call()
    inputs = Inputs(((given,), {}), InputComparison(), objects=True)
    write(given)
    with pytest.raises(InputError, match="under pp a loss that reads the batch"):
        inputs.changed()


def test_nothing_is_found_where_nothing_was_written() -> None:
    given = call()
    inputs = Inputs(((given,), {}), InputComparison(), objects=True)
    given["x"].sum(), given["box"].tensor + 1
    assert inputs.changed() == {}


def test_what_came_from_the_stage_before_is_compared_by_value_where_it_is_an_argument() -> None:
    tensors = [torch.ones(2), torch.ones(2)]
    received = Received(tensors, [False, True], InputComparison())
    tensors[0].data.mul_(2)
    received.check()
    tensors[1].data.mul_(2)
    with pytest.raises(InputError, match="after a cut"):
        received.check()

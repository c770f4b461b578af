"""What a step came to, from its sums and weights."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import NonFiniteLossError
from paceline.strategies.gradients import finish, loss_entry
from paceline.strategies.result import StepResult
from paceline.task import Loss, Weight


def test_numbers() -> None:
    terms = {"balance": torch.tensor([3.0, 2.0]), "unused": torch.tensor([0.0, 0.0])}
    result = StepResult(4, 8, torch.tensor([10.0, 20.0]), terms)
    result.check()
    assert (result.loss, result.weight, result.factor) == (10 / 20 + 3 / 2, 20.0, 8 / 20)
    assert result.auxiliary == {"balance": 1.5, "unused": 0.0}
    assert result.gradient_norm is None


@pytest.mark.parametrize(
    ("entry", "term", "words"),
    [
        ([float("nan"), 1.0], [0.0, 1.0], "step 4: the loss is nan"),
        ([float("inf"), 1.0], [0.0, 1.0], "step 4: the loss is inf"),
        ([1.0, 0.0], [0.0, 1.0], "weight of the whole global batch is 0"),
        ([1.0, float("nan")], [0.0, 1.0], "weight of the whole global batch is nan"),
        ([1.0, -2.0], [0.0, 1.0], "weight of the whole global batch is -2"),
        ([1.0, float("inf")], [0.0, 1.0], "weight of the whole global batch is inf"),
        ([1.0, 1.0], [float("-inf"), 1.0], "step 4: the auxiliary term balance is -inf"),
    ],
)
def test_what_is_no_loss(entry: list[float], term: list[float], words: str) -> None:
    result = StepResult(4, 8, torch.tensor(entry), {"balance": torch.tensor(term)})
    with pytest.raises(NonFiniteLossError, match=words):
        result.check()


def test_finish_scales_then_clips_by_the_norm_of_all() -> None:
    gradients = [torch.tensor([6.0]), torch.tensor([8.0])]
    norm = finish(gradients, 0.5, max_grad_norm=1.0)
    assert norm is not None
    assert norm.item() == 5.0
    # torch's guard adds 1e-6 to the norm of 5.
    assert torch.cat(gradients).tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


def test_finish_leaves_a_small_gradient_alone() -> None:
    gradients = [torch.tensor([0.3]), torch.tensor([0.4])]
    finish(gradients, 1.0, max_grad_norm=1.0)
    assert torch.equal(torch.cat(gradients), torch.tensor([0.3, 0.4]))
    assert finish(gradients, 2.0, max_grad_norm=None) is None
    assert torch.equal(torch.cat(gradients), torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize(
    "weight",
    [
        3,
        True,
        2.5,
        torch.tensor(3),
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor([2]),
        torch.tensor(True),
    ],
)
def test_a_weight_of_any_kind_is_one_number(weight: Weight) -> None:
    entry = loss_entry(Loss(torch.tensor(1.5, dtype=torch.float64), weight), 4)
    assert entry.dtype == torch.float32
    assert entry.tolist() == [1.5, float(weight)]
    elsewhere = loss_entry(
        Loss(torch.tensor(1.5, device="meta"), weight), 4
    )  # as on a GPU, without the numbers
    assert (elsewhere.shape, elsewhere.dtype) == (entry.shape, entry.dtype)


def test_a_result_shows_itself() -> None:
    result = StepResult(3, 8, torch.tensor([4.0, 8.0]), {})
    assert repr(result) == "StepResult(step=3, loss=0.5, weight=8, size=8)"
    result.norm = torch.tensor(2.0)
    assert repr(result) == "StepResult(step=3, loss=0.5, weight=8, size=8, gradient_norm=2)"

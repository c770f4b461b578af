"""A loss is a sum and a weight: a mean under the name of a sum is found, and a sum is never taken for one."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline import Loss, Mean
from paceline.errors import InputError
from paceline.strategies.gradients import loss_entry
from paceline.strategies.guards import loss_checks
from paceline.strategies.guards.loss_checks import check_loss, is_mean
from paceline.training.evaluation import combine
from paceline.world import connect
from tests.unit.training.own_runs import ALONE, data, losses, opened, prepared

WORLD = connect(ALONE, device="cpu")

LABELS = torch.tensor([0, 1, 2, 0])
TARGET = torch.linspace(0.1, 0.9, 12).reshape(4, 3)

MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS),
    "weighted": lambda x: F.cross_entropy(x, LABELS, weight=torch.ones(3)),
    "smoothed": lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1),
    "probabilities": lambda x: F.cross_entropy(x, TARGET),
    "pictures": lambda x: F.cross_entropy(x.T.reshape(1, 3, 2, 2), LABELS.reshape(1, 2, 2)),
    "mse": lambda x: F.mse_loss(x, TARGET),
    "l1": lambda x: F.l1_loss(x, TARGET),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, TARGET),
    "huber": lambda x: F.huber_loss(x, TARGET),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), TARGET),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, TARGET),
    "kl": lambda x: F.kl_div(x.log_softmax(1), TARGET, reduction="batchmean"),
    "gaussian": lambda x: F.gaussian_nll_loss(x, TARGET, torch.ones(4, 3)),
    "poisson": lambda x: F.poisson_nll_loss(x, TARGET),
    "margin": lambda x: F.multi_margin_loss(x, LABELS),
    "mean": lambda x: x.square().mean(),
    "mean of means": lambda x: x.square().mean(1).mean(0),
    "of all dimensions": lambda x: x.square().mean((0, 1)),
    "divided": lambda x: x.square().mean(1).sum() / len(x),
    "divided by a tensor": lambda x: x.square().mean(1).sum() / torch.ones(4).sum(),
    "not a number left out": lambda x: x[:, 0].nanmean(),
    "half": lambda x: F.cross_entropy(x.bfloat16(), LABELS).float(),
    "negative": lambda x: -x.square().mean(),
    "one less": lambda x: 1 - x.square().mean(),
    "a mean divided": lambda x: F.mse_loss(x, TARGET) / len(x),
    "squared errors divided": lambda x: F.mse_loss(x, TARGET, reduction="sum") / len(x),
    "cross entropy divided": lambda x: F.cross_entropy(x, LABELS, reduction="sum") / len(x),
    "smoothed, divided": lambda x: F.cross_entropy(x, LABELS, reduction="sum", label_smoothing=0.1) / len(x),
    "bce divided": lambda x: F.binary_cross_entropy_with_logits(x, TARGET, reduction="sum") / len(x),
    "two terms divided": lambda x: (F.mse_loss(x, TARGET, reduction="sum") + 0.5 * x.exp().sum()) / len(x),
    "a term as large as the count": lambda x: (F.l1_loss(x, TARGET, reduction="sum") + 4 * x.sum()) / len(x),
    "a difference divided": lambda x: (x.exp().sum() - x.sum()) / len(x),
    "half, divided": lambda x: 0.5 * x.square().sum() / len(x),
    "a norm divided": lambda x: x.norm() ** 2 / len(x),
    "items added and divided": lambda x: sum(each(x)) / len(x),
    "with a term": lambda x: F.mse_loss(x, TARGET) + 0.1 * x.square().sum(),
}

SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS, reduction="sum"),
    "mse": lambda x: F.mse_loss(x, TARGET, reduction="sum"),
    "sum": lambda x: x.sum(),
    "of means": lambda x: x.mean(1).sum(),
    "times the count": lambda x: F.mse_loss(x, TARGET) * len(x),
    "over a temperature": lambda x: x.square().sum() / 2.5,
    "one addend an item": lambda x: sum((F.mse_loss(x[i], TARGET[i]) for i in range(4)), torch.zeros(())),
    "of one item's mean": lambda x: (
        F.cross_entropy(x[:1], LABELS[:1], reduction="none") + x[:1].mean(1)
    ).sum(),
    "no graph": lambda x: x.detach().mean(),
}


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    loss_checks._CONSTANTS.clear()


def scores() -> Tensor:
    return torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_found(name: str) -> None:
    made = MEANS[name](scores())
    for weight in (4,) if name == "with a term" else (4, torch.tensor(4)):
        if name.startswith("divided by a tensor") and isinstance(weight, Tensor):
            weight = weight.float()  # noqa: PLW2901 - as the count of a mask is
        assert is_mean(made, weight)
        with pytest.raises(InputError, match=r"a mean where its sum belongs.*Loss.from_mean"):
            check_loss(Loss(made, weight))
        check_loss(Loss.from_mean(made, weight))


def a_mask(x: Tensor) -> Tensor:
    return torch.arange(len(x)).remainder(3).gt(0).float()


def each(x: Tensor) -> list[Tensor]:
    return [F.mse_loss(row, torch.ones(3)) for row in x]


RIGHT: dict[str, Callable[[Tensor], Loss]] = {
    "half": lambda x: Loss(x.square().sum() / 2, len(x)),
    "half of each": lambda x: Loss((x.square().sum(1) / 2).sum(), len(x)),
    "temperature": lambda x: Loss(x.square().sum() / 4.0, len(x)),
    "one dimension kept": lambda x: Loss.mean(x.mean(1, keepdim=True)),
    "per item": lambda x: Loss.mean(x.mean(1)),
    "per element": Loss.mean,
    "squeezed": lambda x: Loss(x.mean(1, keepdim=True).squeeze().sum(), len(x)),
    "added one by one": lambda x: Loss(sum(each(x), torch.zeros(())), len(x)),
    "added in Python": lambda x: Loss(sum(each(x)), len(x)),  # type: ignore[arg-type]
    "two terms an item": lambda x: Loss(sum(one + 0.1 * one for one in each(x)), len(x)),  # type: ignore[arg-type]
    "stacked": lambda x: Loss.mean(torch.stack(each(x))),
    "stacked and summed": lambda x: Loss(torch.stack(each(x)).sum(), len(x)),
    "masked": lambda x: Loss((x.mean(1) * a_mask(x)).sum(), a_mask(x).sum()),
    "masked, over a number": lambda x: Loss((x.mean(1) * a_mask(x)).sum() / 2, a_mask(x).sum()),
    "over a learned number": lambda x: Loss(x.square().sum() / torch.ones((), requires_grad=True), len(x)),
    "with a penalty": lambda x: Loss(x.square().sum() + 0.1 * x.mean() * len(x), len(x)),
    "tokens": lambda x: Loss.tokens(x, torch.zeros(len(x), dtype=torch.long)),
    "times the count": lambda x: Loss.from_mean(x.mean(), len(x)),
    "negative": lambda x: Loss(-x.mean(1).sum(), len(x)),
    "once a batch": lambda x: Loss(x.mean(), 1),
    "by the elements, times the items": lambda x: Loss(
        len(x) * x[:, :1].square().sum() / x[:, :1].numel(), len(x)
    ),
    "auxiliary": lambda x: Loss.mean(x.mean(1), balance=Loss(x.mean(), 1)),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("name", RIGHT)
def test_right_code_passes_with_any_number_of_items(name: str, size: int) -> None:
    check_loss(RIGHT[name](torch.rand(size, 3).requires_grad_()))


@pytest.mark.parametrize("size", [4, 5, 16])
def test_a_masked_mean_is_found(size: int) -> None:
    x = torch.rand(size, 3).requires_grad_()
    mask = (torch.arange(size) > 0).float()
    count, total = mask.sum(), (x.mean(1) * mask).sum()
    for made in (
        Loss(total / count, count),
        Loss(total / mask.sum(), mask.sum()),
        Loss(total / count.clamp(min=1), count),
        Loss(total / count, int(count)),
        Loss(torch.dot(x.mean(1), mask) / count, count),
        Loss(x.square().sum() / size, size),
    ):
        with pytest.raises(InputError, match="a mean where its sum belongs"):
            check_loss(made)


def test_a_constant_that_was_seen_beside_another_weight_is_no_count() -> None:
    squares = [torch.rand(size, 3).requires_grad_().square() for size in (7, 4, 5)]
    with pytest.raises(InputError, match=r"multiply by its inverse \(\* 0.25 for / 4\)"):
        check_loss(Loss(squares[1].sum() / 4, 4))
    check_loss(Loss(squares[1].sum() * 0.25, 4))
    for each_batch in squares:
        check_loss(Loss(each_batch.sum() / 4, len(each_batch)))  # 7 items come first
    with pytest.raises(InputError, match="a mean where its sum belongs"):
        check_loss(Loss(squares[2].sum() / 5, 5))
    with pytest.raises(InputError, match="a mean where its sum belongs"):
        check_loss(Loss(squares[1].exp().norm() / 4, 4))  # another operation


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_left_alone(name: str) -> None:
    assert not is_mean(SUMS[name](scores()), 4)


def test_an_auxiliary_mean_counts_once_or_says_how_often() -> None:
    x = scores()
    check_loss(Loss.mean(x.square().sum(1), balance=Loss(x.mean(), 1)))
    check_loss(Loss.mean(x.square().sum(1), balance=Loss.from_mean(x.mean(), 4)))
    with pytest.raises(InputError, match="auxiliary term balance is a mean"):
        check_loss(Loss.mean(x.square().sum(1), balance=Loss(x.mean(), 4)))


def test_a_mean_is_taken_back_to_its_sum() -> None:
    x = scores()
    made = Loss.from_mean(F.cross_entropy(x, LABELS), 4)
    assert made.weight == 4
    assert torch.allclose(made.total, F.cross_entropy(x, LABELS, reduction="sum"))
    with pytest.raises(InputError, match=r"shape \(4,\), not a mean"):
        Loss.from_mean(F.cross_entropy(x, LABELS, reduction="none"), 4)


IGNORED = torch.full((4,), -100)


@pytest.mark.parametrize("weight", [0, 0.0, (IGNORED != -100).sum()], ids=["int", "float", "tensor"])
def test_a_batch_in_which_nothing_counts_adds_nothing(weight: int | float | Tensor) -> None:
    for made in (
        lambda x: Loss.from_mean(F.cross_entropy(x, IGNORED), weight),
        lambda x: Loss.from_mean(x[IGNORED != -100].mean(), weight),
        lambda x: Loss(F.cross_entropy(x, IGNORED, reduction="sum"), weight),
        lambda x: Loss.tokens(x, IGNORED),
        lambda x: Loss.mean(x[IGNORED != -100]),
    ):
        x = scores()
        loss = made(x)
        check_loss(loss)
        (gradient,) = torch.autograd.grad(loss.total, x)
        assert (loss.total.item(), float(loss.weight)) == (0.0, 0.0)
        assert torch.equal(gradient, torch.zeros_like(x))


def test_no_weight_with_a_total_that_is_no_number_is_refused() -> None:
    x = scores()
    with pytest.raises(
        InputError, match=r"^this loss has the weight 0.*its total is nan.*mean was taken over nothing"
    ):
        check_loss(Loss(F.cross_entropy(x, IGNORED) * 0, 0))
    with pytest.raises(InputError, match=r"^the auxiliary term other has the weight 0"):
        check_loss(Loss.mean(x.square().sum(1), other=Loss(F.cross_entropy(x, IGNORED) * 0, torch.tensor(0))))
    with pytest.raises(InputError, match=r"a mean that was divided by it.*Loss\(total, weight\)"):
        Loss.from_mean((x * 0).sum() / 0, 0)


def test_a_number_has_no_mean() -> None:
    with pytest.raises(InputError, match="a mean of means"):
        Loss.mean(F.cross_entropy(scores(), LABELS))
    check_loss(Loss.mean(F.cross_entropy(scores()[:1], LABELS[:1], reduction="none")))
    assert Loss.mean(F.cross_entropy(scores()[:1], LABELS[:1], reduction="none")).weight == 1


def trained(way: str) -> Tensor:
    with opened(shards=2) as run:
        model, _ = prepared(run)
        for step in run.steps(data(), batch_size=8, epochs=1):
            for batch in step:
                found = losses(model, batch)
                if way == "vector":
                    step.backward(found)
                elif way == "mean":
                    step.backward(found.mean(), len(found))
                elif way == "scalar":
                    step.backward(found.mean())
                else:
                    step.backward(found.sum(), len(found))
            step.apply()
        return model.weight.detach()  # type: ignore[return-value]


def test_a_loop_of_its_own() -> None:
    assert torch.equal(trained("vector"), trained("sum"))
    with pytest.raises(InputError, match="a mean where its sum belongs"):
        trained("mean")
    with pytest.raises(InputError, match="one loss for each item"):
        trained("scalar")


TOO_LARGE = 10**400
NO_NUMBERS: dict[str, tuple[object, str]] = {
    "vector": (torch.ones(2), r"has the shape \(2,\)"),
    "empty": (torch.ones(0), r"has the shape \(0,\)"),
    "complex tensor": (torch.tensor(4 + 0j), r"is of the type torch.complex64"),
    "none": (None, "is None"),
    "list": ([4], r"is \[4\]"),
    "complex": (4 + 0j, r"is \(4\+0j\)"),
    "complex of numpy": (np.complex64(4), "is of the type complex64"),
    "array": (np.ones(3), r"has the shape \(3,\)"),
    "array of text": (np.array("8"), "is of the type <U1"),
    "text": ("8", "is the text '8'"),
    "bytes": (b"8", "is the text b'8'"),
    "too large": (TOO_LARGE, "is larger than any floating-point number"),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_a_weight_is_one_number(name: str) -> None:
    weight, words = NO_NUMBERS[name]
    given: Any = weight
    x = scores()
    with pytest.raises(InputError, match=rf"^Loss.weight {words}; it must be one number"):
        check_loss(Loss(x.sum(), given))
    with pytest.raises(InputError, match=rf"^auxiliary\['balance'\].weight {words}; it must be one number"):
        check_loss(Loss.mean(x.square().sum(1), balance=Loss(x.sum(), given)))
    with pytest.raises(
        InputError, match=rf"^the weight given to Loss.from_mean {words}; it must be one number"
    ):
        Loss.from_mean(x.mean(), given)


REAL_TYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
NUMBERS: dict[str, object] = {
    **{str(dtype): torch.tensor(1).to(dtype) for dtype in REAL_TYPES},
    **{str(kind): kind(1) for kind in (int, float, bool, Fraction, Decimal)},
    **{
        str(kind): kind(1)
        for kind in (np.float16, np.float32, np.float64, np.int8, np.int64, np.uint64, np.bool_)
    },
    "longdouble": np.longdouble(1),
    "array without dimensions": np.array(1.0),
    "array of one": np.ones(1),
    "tensor of one": torch.ones(1),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_weight_is_a_number_of_any_real_type(name: str) -> None:
    given: Any = NUMBERS[name]
    loss = Loss(scores().sum(), given)
    check_loss(loss)
    assert loss_entry(loss, 1)[1] == 1.0
    rows: Any = {(0, 0, 0): {"m": Mean(given, given)}}
    assert combine(rows, WORLD) == {"m": 1.0}


def test_a_total_is_one_real_number() -> None:
    x = scores()
    with pytest.raises(
        InputError, match=r"^Loss.total is of the type torch.complex64; a loss is a real number"
    ):
        check_loss(Loss((x * 1j).sum(), 4))
    number: Any = 1.0
    with pytest.raises(InputError, match=r"^auxiliary\['term'\].total is a float, not a tensor"):
        check_loss(Loss.mean(x.sum(1), term=Loss(number, 1)))
    with pytest.raises(InputError, match=r"^the auxiliary term term is a Tensor, not a paceline.Loss"):
        check_loss(Loss(x.sum(), 4, {"term": x.sum()}))  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"^the auxiliary term outer has terms of its own \(inner\)"):
        check_loss(Loss.mean(x.sum(1), outer=Loss(x.sum(), 1, {"inner": Loss(x.sum(), 1)})))
    for given in ([1.0, 2.0], np.ones(3), 3.0):
        other: Any = given
        with pytest.raises(InputError, match=rf"^Loss.mean was given a {type(given).__name__}, not a tensor"):
            Loss.mean(other)
        with pytest.raises(
            InputError, match=rf"^Loss.from_mean was given a {type(given).__name__}, not a tensor"
        ):
            Loss.from_mean(other, 4)

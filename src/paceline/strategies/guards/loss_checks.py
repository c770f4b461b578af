"""Refuses a model that cannot learn, and losses that are no sum over their items."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import NoReturn

from torch import Tensor

from paceline.errors import InputError
from paceline.strategies.guards.mean_losses import is_mean
from paceline.task import Loss


def check_trainable(parameters: Sized) -> None:
    """Refuse a model that cannot learn; `parameters` are those that are trained."""
    if not len(parameters):
        raise InputError(
            "the model has no trainable parameters: nothing would be learned. Set requires_grad on some."
        )


def check_loss(loss: object) -> None:
    """Refuse what is not a `Loss`, and say how to make one."""
    if not isinstance(loss, Loss):
        raise InputError(
            f"loss() returned a {type(loss).__name__}, not a paceline.Loss. Return paceline.Loss.mean(per_item_losses), "
            "with reduction='none', or paceline.Loss(total, weight)."
        )
    if not isinstance(loss.total, Tensor):
        raise InputError(
            f"Loss.total is a {type(loss.total).__name__}, not a tensor, so it has no gradient. Give the sum, without .item()."
        )
    if loss.total.dim() != 0:
        raise InputError(
            f"Loss.total has the shape {tuple(loss.total.shape)}; it must be one number, a sum. Use Loss.mean."
        )
    if is_mean(loss.total, loss.weight):
        raise InputError(
            "this loss is a mean where its sum belongs, so gradients would be too small by the weight. Give Loss.mean(per_item) "
            "with reduction='none', a sum (reduction='sum') with its weight, or Loss.from_mean(loss, weight); where the sum is "
            "divided by a constant that happens to equal the weight, multiply by its inverse (* 0.25 for / 4)."
        )
    if isinstance(loss.weight, Tensor) or not loss.weight:
        _check_nothing("this loss", loss)
    for name, term in loss.auxiliary.items():
        _check_nothing(f"the auxiliary term {name}", term)
        # With the weight 1 a batch is one item of it, as for a balance loss.
        once = not isinstance(term.weight, Tensor) and term.weight == 1
        if not once and isinstance(term.total, Tensor) and is_mean(term.total, term.weight):
            raise InputError(
                f"the auxiliary term {name} is a mean where its sum belongs. Give Loss.from_mean(term, weight), or the weight 1 "
                "to count it once for each batch."
            )


def refuse_detached() -> NoReturn:
    """Raise for a loss that no gradient goes back from."""
    raise InputError(
        "the loss depends on nothing that is trained (.detach(), no_grad(), a new tensor), so there is no gradient. Compute "
        "it from the model's output; of a batch in which nothing counts that is Loss(0 * outputs.sum(), 0)."
    )


def _check_nothing(what: str, loss: Loss) -> None:
    """Refuse a batch of no weight whose sum is no number, as far as that is known without waiting for a device."""
    total, weight = loss.total, loss.weight
    if not isinstance(total, Tensor) or total.device.type != "cpu" or weight or math.isfinite(total.item()):
        return
    raise InputError(
        f"{what} has the weight 0, for nothing in the batch counts, and its total is {total.item()}, where a sum over nothing "
        "is 0: a mean was taken over nothing. Give the sum (reduction='sum'), or Loss.from_mean(loss, weight)."
    )

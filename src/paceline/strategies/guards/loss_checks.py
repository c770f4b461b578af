"""Refuses a model that cannot learn, and losses that are no sum over their items.

A mean where a sum belongs is found by what autograd remembers of how a number was made.

`Loss(F.cross_entropy(scores, labels), len(labels))` is a mean under the name of a sum: its gradient is too small by the
number of items, and nothing fails. The last operation of a tensor names itself, so the usual ways to take a mean are seen
for about a microsecond. What hides it (a product, a function of one's own) is not looked through: `mean * count` is a sum. Of
what `--compile` compiles the captured graph is asked. Where right code may look the same for some size of a batch, it is left
alone.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.compat.autograd import saved
from paceline.compat.tensors import same_memory
from paceline.errors import InputError
from paceline.task import ONE_WEIGHT, Loss, fault_of

_MEANS = frozenset({"MeanBackward0", "MeanBackward1", "DivBackward1"})
"""`mean()`, and the division that torch's own losses end with; a division in Python is DivBackward0."""
_SAME_VALUE = frozenset(
    {
        "ToCopyBackward0",
        "SqueezeBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
        "CloneBackward0",
        "AliasBackward0",
        "NegBackward0",
        "RsubBackward1",  # one minus a mean is a mean
        "MulBackward1",  # a factor in torch's own losses
    }
)
_ADDITIONS = frozenset({"AddBackward0", "SubBackward0"})
_LOOKED_THROUGH = _SAME_VALUE | _ADDITIONS
_FACTORS = frozenset({"MulBackward0", "DivBackward0"})
_MEAN = 1
"""The number of `reduction="mean"` in torch's losses; 2 is "sum"."""
_MOST_ADDENDS = 3
"""Terms of a loss that are told from items which a loop adds up one by one: more are items."""
_LEAST_COUNT = 3
"""Where a divisor that equals the number of items may be one: half a squared error is a sum for two items too."""
_MOST_PARTS = 10_000
"""How many numbers a divided one is looked through for: only a loop over items has many, and each took it longer."""
_CONSTANTS: set[tuple[str, int]] = set()
"""Whole divisors that this process has seen beside another weight, by the operation they divide.

`squares.sum() / 4` and `squares.sum() / features` are sums, and in a batch of 4 items, or of as many as there are features,
nothing tells them from a mean. A count moves with the weight; what once did not is a constant for good.
"""
_MOST_CONSTANTS = 256


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
    _check_form("Loss", loss)
    for name, term in loss.auxiliary.items():
        if not isinstance(term, Loss):
            raise InputError(
                f"the auxiliary term {name} is a {type(term).__name__}, not a paceline.Loss. Give Loss(term, 1) to count it once "
                "for each batch, or Loss(total, weight)."
            )
        if term.auxiliary:
            raise InputError(
                f"the auxiliary term {name} has terms of its own ({', '.join(term.auxiliary)}), which would not be trained on. "
                "Give all terms to the loss itself, side by side."
            )
        _check_form(f"auxiliary[{name!r}]", term)
    refuse_mean(loss)
    if isinstance(loss.weight, Tensor) or not loss.weight:
        _check_nothing("this loss", loss)
    for name, term in loss.auxiliary.items():
        _check_nothing(f"the auxiliary term {name}", term)


def _check_form(what: str, loss: Loss) -> None:
    """Refuse a loss, or a term of it, whose sum or weight is not one number."""
    if not isinstance(loss.total, Tensor):
        raise InputError(
            f"{what}.total is a {type(loss.total).__name__}, not a tensor, so it has no gradient. Give the sum, without .item()."
        )
    if loss.total.dim() != 0:
        raise InputError(
            f"{what}.total has the shape {tuple(loss.total.shape)}; it must be one number, a sum. Use Loss.mean."
        )
    if loss.total.is_complex():
        raise InputError(
            f"{what}.total is of the type {loss.total.dtype}; a loss is a real number. Give values.abs().square().sum(), or "
            "total.real."
        )
    if fault := fault_of(loss.weight):
        raise InputError(f"{what}.weight {fault}; {ONE_WEIGHT}.")


def refuse_mean(loss: Loss) -> None:
    """Refuse a loss, or a term of it, that is a mean where its sum belongs."""
    if isinstance(loss.total, Tensor) and is_mean(loss.total, loss.weight):
        raise InputError(
            "this loss is a mean where its sum belongs, so gradients would be too small by the weight. Give Loss.mean(per_item) "
            "with reduction='none', a sum (reduction='sum') with its weight, or Loss.from_mean(loss, weight); where the sum is "
            "divided by a constant that happens to equal the weight, multiply by its inverse (* 0.25 for / 4)."
        )
    for name, term in loss.auxiliary.items():
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


def is_mean(total: Tensor, weight: object) -> bool:
    """Return whether a total was made as a mean over the items that its weight counts, alone or with other terms added.

    A weight of 1 is one item, or a term that counts once for each batch. Where there are as many addends as the weight says,
    each is one item (a sequence, say), and their sum is a sum.
    """
    if total.grad_fn is None or (isinstance(weight, int | float) and weight <= 1):
        return False
    if total.grad_fn.name() not in _LOOKED_THROUGH:
        return _takes_mean(total.grad_fn, weight)
    addends = _addends(total.grad_fn)
    if len(addends) > _MOST_ADDENDS:
        return False
    if len(addends) == 1 or _is_smoothed(total.grad_fn):
        return any(_takes_mean(node, weight) for node in addends)
    if not isinstance(weight, int | float) or weight <= len(addends):
        return False
    return any(node is not None and _takes_mean(node, weight) for node in addends)


def _addends(node: Any) -> list[Any]:
    """Return the operations whose values are added up to this one, no more than decide; None for a value without a gradient."""
    waiting, found = [node], list[Any]()
    while waiting and len(found) <= _MOST_ADDENDS:
        one = waiting.pop()
        name = None if one is None else one.name()
        children = [child for child, _ in one.next_functions] if name in _LOOKED_THROUGH else []
        if name in _ADDITIONS or (len(children) == 1 and children[0] is not None):
            waiting += children
        else:
            found.append(one)
    return found


def _is_smoothed(node: Any) -> bool:
    """Return whether this is torch's cross entropy with smoothed labels, which adds two parts with factors of its own."""
    return node.name() == "AddBackward0" and all(
        child is not None and child.name() == "MulBackward1" for child, _ in node.next_functions
    )


def _takes_mean(node: Any, weight: object) -> bool:
    name = node.name()
    if name in _MEANS or saved(node, "reduction") == _MEAN:
        return True
    return name == "DivBackward0" and _divides_by_count(node, weight)


def _divides_by_count(node: Any, weight: object) -> bool:
    """Return whether a number is divided by the very weight that it is given with.

    Whatever the number is, a sum, a loss with `reduction="sum"`, terms added up: as the loss of so many items it has to be their
    sum, and divided by how many they are it is none.
    """
    divided, divisor = node.next_functions[0][0], saved(node, "other")
    learned = any(child is not None for child, _ in node.next_functions[1:])
    if divided is None or divisor is None or divisor.dim() or learned:
        return False
    if isinstance(weight, Tensor):
        if same_memory(weight, divisor):
            return True
        weight = weight.item() if weight.device.type == "cpu" and weight.dtype == divisor.dtype else None
    elif divisor.dtype == torch.float64:
        return False  # of a number in Python only a whole one is a count
    if not isinstance(weight, int | float) or weight < _LEAST_COUNT or divisor.device.type != "cpu":
        return False  # to ask a device would make it wait
    by = divisor.item()
    if by != weight:
        if divisor.dtype == torch.int64 and len(_CONSTANTS) < _MOST_CONSTANTS:
            _CONSTANTS.add((divided.name(), by))
        return False
    return (divided.name(), by) not in _CONSTANTS and not _is_multiplied(divided, by)


def _is_multiplied(divided: Any, by: float) -> bool:
    """Return whether each addend has a factor that takes the division back: `len(x) * sum / elements` is a sum of means."""
    waiting = [divided]
    for _ in range(_MOST_PARTS):
        if not waiting:
            return True
        node = waiting.pop()
        name = node.name()
        if name == "MulBackward0" and any(_is_number(node, one, by) for one in ("self", "other")):
            continue
        if name not in _LOOKED_THROUGH | _FACTORS:
            return False
        waiting += [child for child, _ in node.next_functions if child is not None]
    return False


def _is_number(node: Any, name: str, number: float) -> bool:
    """Return whether an operand that autograd saved is this number, as far as that is known without waiting."""
    operand = saved(node, name)
    return (
        isinstance(operand, Tensor)
        and operand.dim() == 0
        and operand.device.type == "cpu"
        and not operand.requires_grad
        and bool(operand.item() == number)
    )

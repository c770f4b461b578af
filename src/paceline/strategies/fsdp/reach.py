"""Refuses losses and metrics that reach for weights which are not gathered when they do.

What belongs to no block is gathered for the whole pass, so a loss may read it and call any method of the model. The weights
of a block are there during its own forward pass only; outside of it there are rows, from which torch computes something
else or nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

from paceline.compat.dtensor import TO_NUMBER, operator_handlers
from paceline.errors import InputError
from paceline.task import Loss, Mean

Result = TypeVar("Result")


def named_reach(
    function: Callable[[nn.Module, Any], Result], blocks: Sequence[str]
) -> Callable[[nn.Module, Any], Result]:
    """Return the function with torch's complaint about rows beside whole tensors put into words.

    It may not turn rows into a Python number either: torch would make it of this worker's rows alone.
    """
    handlers = operator_handlers()

    def refuse(*_: object) -> NoReturn:
        _refuse(blocks)

    def call(model: nn.Module, batch: Any) -> Result:
        before = handlers.get(TO_NUMBER)
        handlers[TO_NUMBER] = refuse
        try:
            return function(model, batch)
        except (RuntimeError, InputError) as error:
            if any("mixed torch.Tensor and DTensor" in str(one) for one in (error, error.__cause__)):
                _refuse(blocks)
            raise
        finally:
            del handlers[TO_NUMBER]
            if before is not None:
                handlers[TO_NUMBER] = before

    return call


def check_gathered(loss: Loss, blocks: Sequence[str]) -> None:
    """Raise for a loss that was computed from rows."""
    _check([loss.total, *(term.total for term in loss.auxiliary.values())], blocks)


def check_measured(measured: Mapping[str, Any], blocks: Sequence[str]) -> None:
    """Raise for metrics, or outputs, that were computed from rows."""
    parts = [(one.total, one.weight) if isinstance(one, Mean) else (one,) for one in measured.values()]
    _check([value for part in parts for value in part], blocks)


def _check(values: Iterable[object], blocks: Sequence[str]) -> None:
    if any(isinstance(value, DTensor) for value in values):
        _refuse(blocks)


def _refuse(blocks: Sequence[str]) -> NoReturn:
    named = ", ".join(blocks[:3]) + (", ..." if blocks[3:] else "")
    raise InputError(
        f"the loss or a metric uses weights of {named} outside of that block's forward pass, and fsdp gathers them for that "
        "pass only. Let block_modules() return [], which gathers the whole model at once, or use --strategy ddp."
    ) from None

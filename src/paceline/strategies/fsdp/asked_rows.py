"""Looks at backward passes of a loop's own that are asked for the gradients of sharded weights by name.

`loss.backward(inputs=weights)` and `torch.autograd.grad(loss, weights)` are given a worker's rows, and a pass of the model
reaches only the copies that were gathered for it: torch would leave the rows without gradients, and an optimizer passes over
those. What is computed of the rows themselves does reach them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from weakref import finalize

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.compat.autograd import watch_passes
from paceline.strategies.fsdp.lost_gradient import LostGradient, lose_gradient_of

_UNUSED = re.compile(r"Tensor at index (\d+) appears to not have been used")


class AskedRows:
    """Sees the passes that are asked for rows of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._mesh = next((one.device_mesh for one in model.parameters() if isinstance(one, DTensor)), None)
        self.stop: finalize[..., nn.Module] = finalize(model, watch_passes(self._watch))
        """Sees no more: the group is left, or the model gone."""
        self.stop.atexit = False

    def _watch(self, run: Callable[[], Any], inputs: tuple[Any, ...], accumulates: bool) -> Any:
        rows = {place: one for place, one in enumerate(inputs) if self._is_rows(one)}
        if not rows:
            return run()
        if accumulates:
            return _accumulate(run, list(rows.values()))
        try:
            made = run()
        except RuntimeError as error:
            unused = _UNUSED.search(str(error))
            if unused is not None and int(unused[1]) in rows:
                LostGradient.refuse_use()
            raise
        if any(made[place] is None for place in rows):
            LostGradient.refuse_use()
        return made

    def _is_rows(self, one: Any) -> bool:
        return isinstance(one, DTensor) and one.is_leaf and one.device_mesh == self._mesh


def _accumulate(run: Callable[[], Any], rows: list[Tensor]) -> Any:
    """Run a pass, and have the gradients of rows that it does not reach be known for lost."""
    reached: set[int] = set()
    handles = [
        one.register_post_accumulate_grad_hook(lambda one: reached.add(id(one)))  # type: ignore[no-untyped-call]
        for one in rows
    ]
    try:
        made = run()
    finally:
        for handle in handles:
            handle.remove()
    for one in rows:
        if id(one) not in reached:
            lose_gradient_of(one)
    return made

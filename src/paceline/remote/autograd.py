"""Gradients that cross workers, and optimizers that step where the parameters are.

    with remote.backward_pass(optimizer) as pass_:
        loss = model(remote_part(inputs), labels)
        pass_.backward(loss)
        pass_.step()

Every worker keeps the gradients of each pass apart (`gradients.py`), so passes of several workers may overlap.
"""

from __future__ import annotations

import importlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InputError
from paceline.remote import registry
from paceline.remote.calls import method, wait_all
from paceline.remote.counted_references import Reference, reference
from paceline.remote.gradients import Context, inside
from paceline.remote.proxy import create
from paceline.remote.registry import service
from paceline.remote.session import current


class BackwardPass:
    """One forward and backward pass over any number of workers."""

    def __init__(self, context: Context, optimizers: tuple[Optimizer, ...]) -> None:
        self.identity = context.identity
        """What every worker knows the pass by."""
        self._context, self._optimizers = context, optimizers
        self._done = False

    def backward(self, *losses: Tensor, retain_graph: bool = False) -> None:
        """Compute gradients on every worker that took part; they add up within this pass."""
        wrong = [tuple(loss.shape) for loss in losses if loss.dim() != 0]
        if wrong or not losses:
            raise InputError(
                f"backward needs losses of one number each, not {wrong or 'nothing'}. Give a sum or a mean."
            )
        context = self._context
        ones = [torch.ones_like(loss) for loss in losses]
        context.back(losses, ones, retain=retain_graph or context.may_come_again)
        self._done = True

    def gradients(self) -> dict[Tensor, Tensor]:
        """Return the gradients of this worker's own parameters."""
        return dict(self._context.gradients)

    def step(self) -> None:
        """Let every optimizer update its parameters with the gradients of this pass, all owners at once."""
        if not self._optimizers:
            raise InputError("the pass has no optimizer. Give it to remote.backward_pass(optimizer).")
        if not self._done:
            raise InputError(
                "step came before backward, so there are no gradients yet. Call pass_.backward(loss)."
            )
        for optimizer in self._optimizers:
            optimizer.step(self)


@contextmanager
def backward_pass(*optimizers: Optimizer) -> Iterator[BackwardPass]:
    """Open a pass: what is computed inside, here or by calls to others, is remembered for its backward."""
    passes = current().passes
    context = passes.begin()
    try:
        with inside(context):
            yield BackwardPass(context, optimizers)
    finally:
        passes.end(context.identity)


def gradients_here(identity: int) -> dict[Tensor, Tensor]:
    """Return the gradients that a pass has left on this worker, by parameter."""
    context = current().passes.find(identity)
    return {} if context is None else dict(context.gradients)


class Optimizer:
    """Any torch optimizer, one instance on each worker that owns parameters."""

    def __init__(
        self,
        made_by: type[torch.optim.Optimizer],
        parameters: Iterable[Reference[Tensor] | Tensor],
        **options: Any,
    ) -> None:
        owned: dict[str, list[Reference[Tensor]]] = defaultdict(list)
        for one in parameters:
            held = one if isinstance(one, Reference) else reference(one)
            owned[held.owner].append(held)
        if not owned:
            raise InputError(
                "the optimizer got no parameters. Give references to them, or tensors of this worker."
            )
        address = registry.address_of(made_by)
        self._parts = [
            create(worker, OwnedOptimizer, address, held, options) for worker, held in owned.items()
        ]

    def step(self, *passes: BackwardPass) -> None:
        """Update the parameters on all owners with the gradients of a pass, or of several, added up in their order."""
        identities = [one.identity for one in passes]
        wait_all([method(part.step).future(identities) for part in self._parts])


@service
class OwnedOptimizer:
    """The part of an optimizer that lives with the parameters of one worker."""

    def __init__(self, address: str, parameters: list[Reference[Tensor]], options: dict[str, Any]) -> None:
        self._parameters = [one.local() for one in parameters]
        self._optimizer = _optimizer_class(address)(self._parameters, **options)
        self._lock = threading.Lock()

    def step(self, identities: list[int]) -> None:
        """Update with the gradients of some passes, added up in their order; steps of several workers take turns."""
        found = [gradients_here(identity) for identity in identities]
        with self._lock:
            for parameter in self._parameters:
                for gradients in found:
                    if parameter in gradients:
                        mine = gradients[parameter]
                        parameter.grad = mine if parameter.grad is None else parameter.grad + mine
            try:
                self._optimizer.step()
            finally:  # also where it fails: the next step is not to add to these
                for parameter in self._parameters:
                    parameter.grad = None


def _optimizer_class(address: str) -> Any:
    """Find an optimizer by its address: torch's own, or one that was registered with `remote.allow`."""
    module, _, name = address.partition(":")
    if module.startswith("torch.optim."):
        found = getattr(importlib.import_module(module), name, None)
    else:
        found = registry.value_type(module, name)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise InputError(f"{address} is no optimizer that is known here. Put @remote.allow above its class.")
    return found

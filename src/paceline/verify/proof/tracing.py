"""Writes down what torch is asked to compute for the loss of one step, call by call, with a digest of what goes in and out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from paceline.verify.proof import digests
from paceline.verify.proof.record import TorchCall


@contextmanager
def forward_hooks(
    model: nn.Module,
    enter: Callable[[str], object] | None = None,
    leave: Callable[[str, Any], object] | None = None,
) -> Iterator[None]:
    """While the block lasts, call `enter(name)` before each module's forward pass and `leave(name, output)` after it."""
    handles = []
    for name, module in model.named_modules():
        if enter is not None:

            def before(*_: Any, name: str = name) -> None:
                enter(name)

            handles.append(module.register_forward_pre_hook(before))
        if leave is not None:

            def after(*called: Any, name: str = name) -> None:
                leave(name, called[-1])

            # Who counts entries has to see every exit, also by an exception that the model catches.
            handles.append(module.register_forward_hook(after, always_call=enter is not None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Tracer:
    """The calls of one step of one worker."""

    def __init__(self, model: nn.Module, batches: Mapping[int, Sequence[Any]]) -> None:
        self.calls: list[TorchCall] = []
        self._model = model
        self._places = {
            digests.of_batch(batch): (shard, number)
            for shard, held in batches.items()
            for number, batch in enumerate(held)
        }
        self._inside = threading.local()

    def watching(self) -> AbstractContextManager[None]:
        """Keep track of the module that runs, while the block lasts."""
        return forward_hooks(self._model, lambda name: self._stack().append(name), self._leaving)

    def _leaving(self, *_: Any) -> None:
        if self._stack():
            self._stack().pop()

    def traced(self, loss: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
        """Compute the loss of a batch and note every call."""
        shard, number = self._places.get(digests.of_batch(batch), (-1, -1))
        with _Notes(self, shard, number):
            return loss(model, batch)

    def note(self, shard: int, batch: int, function: Any, inputs: tuple[str, ...], output: Any) -> None:
        """Add one call; its gradient comes with the backward pass."""
        stack = self._stack()
        call = TorchCall(
            shard=shard,
            batch=batch,
            module=stack[-1] if stack else "",
            function=(resolve_name(function) or getattr(function, "__name__", str(function))),
            inputs=inputs,
            output=_told(output),
        )
        self.calls.append(call)
        if isinstance(output, Tensor) and output.requires_grad and not output.is_leaf:

            def keep(gradient: Tensor) -> None:
                call.gradient = _told(gradient)

            output.register_hook(keep)  # type: ignore[no-untyped-call]

    def _stack(self) -> list[str]:
        if not hasattr(self._inside, "stack"):
            self._inside.stack = []
        stack: list[str] = self._inside.stack
        return stack


class _Notes(TorchFunctionMode):
    def __init__(self, tracer: Tracer, shard: int, batch: int) -> None:
        super().__init__()
        self._tracer, self._shard, self._batch = tracer, shard, batch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        # Before the call, which may change them.
        inputs = tuple(_told(one) for one in given)
        output = func(*args, **(kwargs or {}))
        if any(
            isinstance(one, Tensor) for one in (output if isinstance(output, (tuple, list)) else [output])
        ):
            self._tracer.note(self._shard, self._batch, func, inputs, output)
        return output


def _told(value: Any) -> str:
    """Return a digest of a tensor, and of anything else what it reads like."""
    if isinstance(value, Tensor):
        if type(value).__name__ not in ("Tensor", "Parameter"):
            return f"a {type(value).__name__}"  # sharded: no worker knows all of it
        return digests.of_values([("", value.detach().to_dense())])[""]
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_told(one) for one in value)}]"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return type(value).__name__

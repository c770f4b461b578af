"""Rows and optimizer state that live in host memory, and are updated on the device, a bunch at a time.

The device computes the update, not the host: so the bits are those of a run whose state lies in the device's memory, which
holds no more of it at any moment than one bunch. Gradients stay on the device; those of a worker's rows are small.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.state.packing import bunches

BUNCH = 256 << 20
"""Bytes of rows that are on the device at once; their optimizer state comes with them."""


def without_memory(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a placeholder tensor of a shape, whose elements all share the memory of one."""
    return torch.empty((), dtype=dtype, device=device).expand(tuple(shape))


class HostRows:
    """What an optimizer works on, kept in host memory between its updates.

    Its parameters stand for the rows (`without_memory`) and carry their gradients, so whatever looks at gradients need not know.
    """

    def __init__(
        self, homes: Mapping[nn.Parameter, Tensor], optimizer: Optimizer, bunch: int = BUNCH
    ) -> None:
        """`homes` gives for each parameter the rows it stands for, in host memory."""
        self._homes, self._optimizer, self._bunch = homes, optimizer, bunch
        self._step: Callable[[], Any] = optimizer.step
        self._slots: dict[tuple[nn.Parameter, str], Tensor] = {}

        # A loss scaler calls the optimizer itself, and a schedule looks for its own mark there.
        @functools.wraps(optimizer.step)
        def step() -> None:
            self.step()

        optimizer.step = step  # type: ignore[method-assign,assignment]

    def release(self) -> None:
        """Restore the optimizer's own step."""
        self._optimizer.step = self._step  # type: ignore[method-assign,assignment]

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Point the parameters at their rows in host memory, so that what is loaded into them lands there."""
        stand_ins = {parameter: parameter.data for parameter in self._homes}
        for parameter, rows in self._homes.items():
            parameter.grad = None
            parameter.data = rows
        try:
            yield
        finally:
            for parameter, stand_in in stand_ins.items():
                parameter.data = stand_in

    def step(self) -> None:
        """Update all rows that have a gradient."""
        gradients = {
            parameter: parameter.grad
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }
        for parameter in gradients:
            parameter.grad = None
        for bunch in bunches(gradients, lambda one: one.numel() * one.element_size(), self._bunch):
            self._update({parameter: gradients[parameter] for parameter in bunch})
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        device = next((parameter.device for parameter in gradients), torch.device("cpu"))
        if device.type != "cpu":
            # Whoever reads the rows next may do so without the device: a checkpoint, say.
            torch.accelerator.current_stream(device).synchronize()

    def _update(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Bring a bunch to the device, update it there, and send it home; others have no gradient and are left alone."""
        stand_ins = {parameter: parameter.data for parameter in gradients if parameter in self._homes}
        on_device = {
            id(one)
            for group in self._optimizer.param_groups
            if _counts_on_device(group)
            for one in group["params"]
        }
        for parameter, stand_in in stand_ins.items():
            parameter.data = self._homes[parameter].to(stand_in.device, non_blocking=True)
            state = self._optimizer.state.get(parameter, {})
            for slot, value in self._tensors(state):
                if value.shape == parameter.shape or id(parameter) in on_device:
                    state[slot] = value.to(stand_in.device, non_blocking=True)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        self._step()
        for parameter in gradients:
            parameter.grad = None
        for parameter, stand_in in stand_ins.items():
            self._homes[parameter].copy_(parameter.data, non_blocking=True)
            state = self._optimizer.state.get(parameter, {})
            for slot, value in self._tensors(state):
                if value.shape == parameter.shape:
                    state[slot] = self._home_of(parameter, slot, value).copy_(value, non_blocking=True)
            parameter.data = stand_in

    @staticmethod
    def _tensors(state: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        return [(slot, value) for slot, value in state.items() if isinstance(value, Tensor)]

    def _home_of(self, parameter: nn.Parameter, slot: str, value: Tensor) -> Tensor:
        """Return host memory for one piece of optimizer state, the same in every step."""
        key = (parameter, slot)
        if key not in self._slots:
            pinned = value.device.type != "cpu"
            self._slots[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
        return self._slots[key]


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    """Whether an optimizer wants its count of steps on the device too."""
    return bool(group.get("fused") or group.get("capturable"))

"""The optimizer's update on a GPU: torch's fused kernel where the optimizer has one, and the user has asked for no other.

The kernel is the same under every strategy, computed or replayed from a CUDA graph. The groups of the optimizer say nothing of
it, so checkpoints are the same as a CPU's. A captured update reads the learning rate from the device, where
numbers are single; so every fused update takes it rounded to that.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.compat.optim import has_own_step, step_hooks, step_without_hooks
from paceline.state.optimizer_state import check_own_entries

Hook = TypeVar("Hook", bound=Callable[..., Any])
_FUSED = (Adam, AdamW, SGD)
_CHOICES = ("fused", "foreach", "capturable", "differentiable")
"""What a user may have said of how an update is computed; a group may lack some."""
_PAYS = 20
"""After so many replays of one captured update it is worth while to capture another."""
_TRIES = 4
"""How often options may change before that, until updates are captured no more."""


class FusedUpdate:
    """Steps one optimizer."""

    def __init__(self, optimizer: Optimizer, device: torch.device, note: Callable[[str], None]) -> None:
        """`note` tells the user something."""
        self._optimizer, self._device = optimizer, device
        self._fuses = device.type == "cuda" and type(optimizer) in _FUSED
        self._graph: _UpdateGraph | None = None
        self._fails = False
        self._tries = 0
        self._note = note

    def forget(self) -> None:
        """Drop what was captured: the optimizer's state, or the gradients that it takes, are others."""
        self._graph = None

    def step(self, *, static: bool = False) -> None:
        """Update the weights; where the gradients are `static`, lying where they lay in the step before, by a CUDA graph."""
        if not self._fuses:
            self._optimizer.step()
        elif not (static and self._replays()):
            with self.swapped():
                self._optimizer.step()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Have the optimizer use its fused kernel, for the duration of the context."""
        taken = (
            [group for group in self._optimizer.param_groups if self._is_free(group)] if self._fuses else []
        )
        rates = [group["lr"] for group in taken]
        if taken:
            self._place_counts()
        for group, rate in zip(taken, rates, strict=True):
            group["fused"], group["lr"] = True, _single(rate)
        try:
            yield
        finally:
            for group, rate in zip(taken, rates, strict=True):
                group["fused"] = None
                if group["lr"] == _single(rate):  # else a hook on the step has set another one
                    group["lr"] = rate

    def _is_free(self, group: dict[str, Any]) -> bool:
        """Return whether nobody has said how a group is updated, and the fused kernel can do it."""
        return (
            not any(group.get(choice) for choice in _CHOICES)
            and group.get("foreach") is None
            and group.get("fused") is None
            and isinstance(group["lr"], float)
            and all(
                one.is_cuda and one.is_floating_point() and _is_dense(one.grad) for one in group["params"]
            )
        )

    def _place_counts(self) -> None:
        """Put the numbers of steps on the GPU, where a state that was read or made elsewhere has them on the CPU."""
        state = self._optimizer.state
        first = next(iter(state.values()), None)
        count = None if first is None else first.get("step")
        if isinstance(count, Tensor) and not count.is_cuda:
            for parameter, entry in state.items():
                if isinstance(entry.get("step"), Tensor):
                    entry["step"] = entry["step"].to(parameter.device, torch.float32)

    # As a CUDA graph.

    def _replays(self) -> bool:
        """Replay the update, captured before or now; return whether that could be."""
        optimizer = self._optimizer
        if (
            self._fails
            or has_own_step(optimizer)
            or not all(_is_left_out(hook) for _, hook in step_hooks(optimizer))
        ):
            return False
        if self._graph is not None and not self._graph.fits():
            self._tries = self._tries + 1 if self._graph.replayed < _PAYS else 0
            self.forget()
            if self._tries > _TRIES:
                # A schedule of momentum or betas, say: each capture takes longer than a step.
                self._fails = True
                self._note(
                    "the update is not captured as a CUDA graph: options of the optimizer change from step to step."
                )
                return False
        if self._graph is None:
            groups = self._optimizer.param_groups
            if not all(map(self._is_free, groups)) or not _has_state(self._optimizer):
                return False
            try:
                self._graph = _UpdateGraph(self._optimizer, self._device)
            except Exception as error:  # noqa: BLE001 - whatever keeps it from being captured: it is computed, to the same bits
                self._fails = True
                self._note(f"the update is not captured as a CUDA graph ({type(error).__name__}: {error}).")
                return False
        self._graph.replay()
        return True


class _UpdateGraph:
    """One captured update, over gradients and a state that lie where they lay."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        self._rates = [torch.zeros((), dtype=torch.float32, device=device) for _ in groups]
        self._set: list[float | None] = [None for _ in groups]
        self._options = [_options(group) for group in groups]
        # Kept, and not known by a number: what is gone may have left its number to another.
        self._held, self._places = self._read_and_written()
        self.replayed = 0
        rates = [group["lr"] for group in groups]
        self._graph = torch.cuda.CUDAGraph()
        for group, tensor in zip(groups, self._rates, strict=True):
            group["fused"], group["lr"] = True, tensor
            if "capturable" in group:
                group["capturable"] = True
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                step_without_hooks(optimizer)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["fused"], group["lr"] = None, rate
                if "capturable" in group:
                    group["capturable"] = False

    def fits(self) -> bool:
        """Return whether options, gradients and state are those that were captured, the learning rate aside."""
        groups = self._optimizer.param_groups
        return (
            len(groups) == len(self._options)
            and all(isinstance(group["lr"], float) for group in groups)
            and all(_options(group) == then for group, then in zip(groups, self._options, strict=True))
            and self._is_in_place()
        )

    def _is_in_place(self) -> bool:
        held, places = self._read_and_written()
        return places == self._places and len(held) == len(self._held) and all(map(is_, held, self._held))

    def _read_and_written(self) -> tuple[list[Any], list[int]]:
        """Return what the kernels read and write, and where it lies."""
        state = self._optimizer.state
        held = [
            one
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for one in (parameter, parameter.grad, *state.get(parameter, {}).values())
        ]
        return held, [one.data_ptr() for one in held if isinstance(one, Tensor)]

    def replay(self) -> None:
        """Update the weights with the learning rates of now."""
        for place, group in enumerate(self._optimizer.param_groups):
            if group["lr"] != self._set[place]:
                self._set[place] = group["lr"]
                self._rates[place].fill_(group["lr"])
        self.replayed += 1
        self._graph.replay()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}


def _single(rate: float) -> float:
    """Return a number rounded to single precision."""
    return float(struct.unpack("f", struct.pack("f", rate))[0])


def _is_dense(gradient: Tensor | None) -> bool:
    return gradient is None or gradient.layout == torch.strided


def only_guards(hook: Hook) -> Hook:
    """Mark a hook on an optimizer's step that looks who calls it, or seeds what an update draws: a captured one goes without."""
    vars(hook)["only_guards"] = True
    return hook


def _is_left_out(hook: Any) -> bool:
    """Return whether a hook has done its work in the first step, or only guards; all others are called in every step."""
    return (
        getattr(hook, "only_guards", False)
        or getattr(hook, "__module__", None) == check_own_entries.__module__
    )


def _has_state(optimizer: Optimizer) -> bool:
    """Return whether every parameter with a gradient has its state: what is made in a capture would not be."""
    return all(
        bool(optimizer.state.get(one))
        for group in optimizer.param_groups
        for one in group["params"]
        if one.grad is not None and group.get("momentum", 1) != 0
    )

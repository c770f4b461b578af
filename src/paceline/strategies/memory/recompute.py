"""Activations of the repeated blocks computed again in the backward pass instead of kept: `--activation-checkpointing`.

A block's forward is wrapped in place, so modules and parameters keep their names. The second pass draws the random
numbers of the first and leaves buffers alone, so the bits are those of a run that keeps everything. Random numbers of
numpy and of Python's own `random` are not drawn the same again: a block must not use them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.compat.dispatch import ATTENTION, arguments_of, no_modes
from paceline.compat.modules import NormWithStatistics, buffers_of
from paceline.compat.tensors import write_count
from paceline.errors import InputError
from paceline.strategies.memory.blocks import find_blocks
from paceline.strategies.structure import Structure
from paceline.strategies.tuning import Tuning

PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    *ATTENTION,
)
"""What is dear to compute; everything else in a block is cheap beside it."""
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
Places = list[tuple[nn.Module, str]]


def recompute_blocks(model: nn.Module, structure: Structure, tuning: Tuning) -> None:
    """Turn activation checkpointing on for a model's repeated blocks, in place; a block is wrapped once."""
    if tuning.activation_checkpointing == "none":
        return
    blocks = list(find_blocks(model, structure).items())
    if not blocks:
        raise InputError(
            f"--activation-checkpointing {tuning.activation_checkpointing} works on the repeated blocks of a model, "
            f"and {type(model).__name__} has none. "
            "Name them in the task's block_modules(), or leave --activation-checkpointing out."
        )
    selective = tuning.activation_checkpointing == "selective"
    for name, block in blocks[:: tuning.activation_checkpointing_every]:
        if not isinstance(block.__dict__.get("forward"), Recomputed):
            if selective:
                _check_in_place(name, block)
            # An attribute of the instance, which torch's __call__ prefers to the method of its class.
            block.forward = Recomputed(block, selective=selective)


def check_passes(kind: str) -> None:
    """Refuse a second backward pass through blocks that give what they keep away in the first."""
    if kind == "selective":
        raise InputError(
            "--activation-checkpointing selective goes back through a block once, and auxiliary terms need a pass each. "
            "Use --activation-checkpointing blocks."
        )


class Recomputed:
    """A block's forward that keeps its inputs, and all else only until it returns.

    An object, not a closure: a deep copy of the model takes a copy of the block along.
    """

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        self._block, self._selective = block, selective
        self._forward = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block; in the backward pass once more."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        options: dict[str, Any] = {"context_fn": _keep_products} if self._selective else {}
        passed: Callable[..., Any] = self._forward
        if not torch.compiler.is_compiling():  # compiled code recomputes without a second pass through here
            passed = _Passes(self._block, self._forward)
        return checkpoint(passed, *args, use_reentrant=False, **options, **kwargs)


class _Passes:
    """The passes of one call: the first changes buffers as the block sees fit, later ones put them back."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self._block, self._forward = block, forward
        self._changed: Places | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._changed is None:
            return self._first(*args, **kwargs)
        if not self._changed:
            return self._forward(*args, **kwargs)
        # Under the eyes of selective recomputation these copies would count as work of the block.
        with no_modes():
            held = [(module, name, buffers_of(module)[name]) for module, name in self._changed]
            kept = [None if value is None else value.clone() for _, _, value in held]
        try:
            return self._forward(*args, **kwargs)
        finally:  # torch stops a second pass by an exception as soon as it has what it needs
            with no_modes(), torch.no_grad():
                for (module, name, value), old in zip(held, kept, strict=True):
                    buffers_of(module)[name] = value
                    if value is not None and old is not None:
                        value.copy_(old)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        places = [
            (module, name)
            for module in self._block.modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        before = [_mark(module, name) for module, name in places]
        made = self._forward(*args, **kwargs)
        self._changed = [
            (module, name)
            for (module, name), mark in zip(places, before, strict=True)
            # BatchNorm's kernels write to its statistics without counting it as a write.
            if _mark(module, name) != mark or (isinstance(module, NormWithStatistics) and module.training)
        ]
        return made


def _mark(module: nn.Module, name: str) -> tuple[int, int]:
    value = buffers_of(module)[name]
    return (0, 0) if value is None else (id(value), write_count(value))


def _keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    contexts: Contexts = partial(create_selective_checkpoint_contexts, _policy)
    return contexts()


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if getattr(operation, "overloadpacket", None) in _PACKETS and not _draws(operation, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation draws random numbers: kept, it would not draw them again, and all later ones would shift."""
    names = [argument.name for argument in arguments_of(operation)]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p", 0.0))


def _check_in_place(name: str, block: nn.Module) -> None:
    for path, module in block.named_modules():
        if getattr(module, "inplace", False) is True:
            raise InputError(
                f"--activation-checkpointing selective keeps products as they are, but {name}.{path} "
                f"({type(module).__name__}) writes over its input. "
                "Make it with inplace=False, or use --activation-checkpointing blocks."
            )


_PACKETS = {getattr(torch.ops.aten, name) for name in PRODUCTS if hasattr(torch.ops.aten, name)}

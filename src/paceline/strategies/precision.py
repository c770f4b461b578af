"""Mixed precision: which type the forward pass computes in, and the scaler that fp16 needs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from paceline.compat import pytree
from paceline.errors import InputError, UnknownNameError

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """A name of the command line, made usable."""

    name: str
    device: torch.device

    def __post_init__(self) -> None:
        if self.name not in _TYPES:
            raise UnknownNameError("precision", self.name, _TYPES)
        if self.name == "fp16" and self.device.type != "cuda":
            raise InputError("--precision fp16 needs a CUDA device. Use bf16, which works everywhere.")

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context for one forward pass and its loss."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=_TYPES[self.name])

    def scaler(self) -> torch.amp.GradScaler | None:
        """Return what keeps small fp16 gradients from vanishing; None where none is needed."""
        return torch.amp.GradScaler(self.device.type) if self.name == "fp16" else None


def widened(output: Any) -> Any:
    """Return what a model gives with its tensors of half precision in fp32, so that a loss outside stays exact."""
    return pytree.tree_map_only(torch.Tensor, _widen, output)


def _widen(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value

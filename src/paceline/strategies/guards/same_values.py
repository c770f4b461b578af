"""Compares tensors by what they hold: torch counts writes in place, but none through `.data`, through numpy or by some kernels.

NaN is the same as NaN here, unlike for `torch.equal`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.compat.dispatch import is_traceable_wrapper_subclass
from paceline.compat.tensors import sparse_parts

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's own memory, seen as integers."""
    plain = tensor.detach()
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    return plain.view(_WHOLE[plain.element_size()])


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the memory that a tensor's values lie in; none where it has no values, or hides them."""
    if tensor.is_meta or tensor.is_quantized or is_traceable_wrapper_subclass(tensor):
        return []
    plain = tensor.detach()
    if plain.layout is torch.strided:
        return [plain]
    if plain.layout is torch.sparse_coo:
        return [*sparse_parts(plain)]
    return [plain.values()] if plain.layout in _COMPRESSED else []


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one type and shape hold the same bits."""
    return torch.equal(bits(one), bits(other))


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same numbers, NaN included; 0.0 and -0.0 are one number."""
    if one.dtype != other.dtype:
        return torch.equal(one, other)
    one, other = _comparable(one), _comparable(other)
    return torch.equal(one, other) or (one.shape == other.shape and same_bits(one, other))


def _comparable(tensor: Tensor) -> Tensor:
    """Return a tensor in a type that torch compares: it has no comparison of complex numbers of 16 bits, nor of packed ones."""
    if tensor.dtype == torch.complex32:
        return torch.view_as_real(tensor.detach().resolve_conj())
    return tensor.view(torch.uint8) if tensor.dtype == torch.float4_e2m1fn_x2 else tensor


def differing_bits(now: Sequence[Tensor], before: Sequence[Tensor]) -> list[int]:
    """Return the places in which tensors of the same types and shapes differ; a GPU is waited for once, not for each."""
    if not now or all(one.device.type == "cpu" for one in now):
        return [place for place, pair in enumerate(zip(now, before, strict=True)) if not same_bits(*pair)]
    flags = [(bits(one) != bits(other)).any() for one, other in zip(now, before, strict=True)]
    return [place for place, flag in enumerate(torch.stack(flags).tolist()) if flag]

"""Checks that turn a wrong argument of an operation into one clear line before any message is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import InputError, UnknownNameError

REDUCE_OPS = ("sum", "mean", "min", "max", "product")
_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_WHOLE = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})


def check_reduce(op: str, tensor: Tensor) -> None:
    """Refuse an unknown reduce-op, and one that no backend can compute on this type."""
    if op not in REDUCE_OPS:
        raise UnknownNameError("reduce-op", op, REDUCE_OPS)
    dtype = tensor.dtype
    if dtype in _FLOATING or (dtype in _WHOLE and op != "mean"):
        return
    if dtype is torch.bool and op in ("min", "max"):
        return
    if dtype in _WHOLE:
        advice = "Reduce with 'sum' and divide, or cast to a floating type first."
    elif dtype is torch.bool:
        advice = "Use 'max' for any and 'min' for all, or cast to torch.int64 to count."
    elif dtype.is_complex:
        advice = "Reduce torch.view_as_real(tensor) instead."
    else:
        advice = "Cast to torch.int32 or torch.float32 first."
    raise InputError(f"{op!r} cannot be computed on {dtype} across workers. {advice}")


def check_rank(what: str, rank: int, size: int) -> None:
    """Refuse a root or a peer that is not in the group."""
    if not 0 <= rank < size:
        raise InputError(
            f"{what} is {rank}, but the group has {size} workers. Use a rank from 0 to {size - 1}."
        )


def check_peer(what: str, peer: int, rank: int, size: int) -> None:
    """Refuse a partner outside the group, and oneself."""
    check_rank(what, peer, size)
    if peer == rank:
        raise InputError(f"rank {rank} cannot be its own partner ({what}={peer}). Name another rank.")


def check_parts(operation: str, tensors: Sequence[Tensor], size: int) -> None:
    """Refuse a list that does not hold one tensor of the same type for each rank."""
    if len(tensors) != size:
        raise InputError(
            f"{operation} got {len(tensors)} tensors for {size} workers. Give one for each rank."
        )
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in types))
        raise InputError(f"{operation} got tensors of several types ({names}). Cast them to one.")


def check_same_shape(operation: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    """Refuse tensors that differ from `like` in shape or type."""
    for index, tensor in enumerate(tensors):
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise InputError(
                f"{operation} needs equal tensors, but item {index} is {tuple(tensor.shape)} {tensor.dtype}"
                f" and not {tuple(like.shape)} {like.dtype}. Pad them, or use all_to_all for uneven ones."
            )


def check_rows(tensors: Sequence[Tensor], rows: Sequence[int] | None, size: int) -> None:
    """Refuse tensors that differ in more than their first dimension, or a list of rows that does not fit."""
    if any(tensor.dim() == 0 for tensor in tensors):
        raise InputError("all_to_all cannot split a tensor without dimensions. Use tensor.reshape(1).")
    tails = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(tails) > 1:
        raise InputError(
            f"all_to_all got rows of shapes {sorted(tails)}. Only the first dimension may differ."
        )
    if rows is not None and len(rows) != size:
        raise InputError(
            f"all_to_all got {len(rows)} numbers of rows for {size} workers. Give one for each rank."
        )


def check_in_place(tensor: Tensor) -> None:
    """Refuse a tensor that cannot be reduced where it lies."""
    if not tensor.is_contiguous():
        raise InputError(
            "all_reduce_ works in place and needs a contiguous tensor. Use all_reduce, or .contiguous()."
        )

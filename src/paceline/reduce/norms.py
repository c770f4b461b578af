"""Norms of gradients, to the bit the same wherever a gradient lies in memory, and the norm of a whole gradient from them.

Nothing is held twice: where a kernel adds in an order that depends on the address, a bounded part at a time is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from paceline.compat import foreach
from paceline.reduce.packing import as_real, dense_strides

CHUNK = 1 << 22
"""Numbers of which CUDA takes one norm, and of the memory that they are copied to: 16 MB in 32 bits."""
_ALIGNMENT = 64
"""Bytes. CUDA's kernels read four numbers at a time where an address allows it, and then add in another order."""
_SMALL_TYPES = (torch.bfloat16, torch.float16)


def norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each gradient; on a CPU to the bit as `torch.nn.utils.clip_grad_norm_` takes it."""
    if not gradients:
        return []
    return norms_by_chunk(gradients) if gradients[0].is_cuda else list(foreach.norm(list(gradients)))


def norms_by_chunk(gradients: Sequence[Tensor], chunk: int = CHUNK) -> list[Tensor]:
    """Return the norm of each gradient from those of its chunks; no copies but of one chunk, and none of what is aligned."""
    flat = [_in_memory_order(one) for one in gradients]
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(one.dtype for one in flat):
        places = [place for place, one in enumerate(flat) if one.dtype == dtype]
        parts = [torch.split(flat[place], chunk) for place in places]
        measured = iter(_aligned_norms([part for inside in parts for part in inside], chunk))
        for place, inside in zip(places, parts, strict=True):
            mine = [next(measured) for _ in inside]
            whole = mine[0] if len(mine) == 1 else torch.linalg.vector_norm(torch.stack(mine))
            found[place] = whole.to(dtype)
    return [found[place] for place in range(len(flat))]


def _in_memory_order(gradient: Tensor) -> Tensor:
    """Return a gradient's numbers as they follow each other in memory."""
    real = as_real(gradient)
    if real.stride() != dense_strides(real):
        real = real.contiguous()
    return real.as_strided((real.numel(),), (1,))


def _aligned_norms(parts: Sequence[Tensor], chunk: int) -> list[Tensor]:
    """Return the norms of parts of one type, each as if it began at an aligned address."""
    found: dict[int, Tensor] = {}
    apart = [place for place, one in enumerate(parts) if one.data_ptr() % _ALIGNMENT]
    straight = [place for place, one in enumerate(parts) if not one.data_ptr() % _ALIGNMENT]
    found |= dict(zip(straight, _precise_norms([parts[place] for place in straight]), strict=True))
    if apart:
        step = _ALIGNMENT // parts[0].element_size()
        room = parts[0].new_empty(-(-chunk // step) * step)
        batch: list[int] = []
        slots: list[Tensor] = []
        start = 0
        for place in apart:
            count = parts[place].numel()
            if start + count > room.numel():
                found |= zip(batch, _copied_norms(slots, [parts[one] for one in batch]), strict=True)
                batch, slots, start = [], [], 0
            batch.append(place)
            slots.append(room[start : start + count])
            start += -(-count // step) * step
        found |= zip(batch, _copied_norms(slots, [parts[one] for one in batch]), strict=True)
    return [found[place] for place in range(len(parts))]


def _copied_norms(slots: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
    foreach.copy_(slots, parts)
    return _precise_norms(slots)


def _precise_norms(parts: list[Tensor]) -> list[Tensor]:
    """Return norms that are not rounded to 16 bits: those of the chunks of one gradient are only a step on the way."""
    if not parts:
        return []
    dtype = torch.float32 if parts[0].dtype in _SMALL_TYPES else None
    return list(foreach.norm(parts, 2, dtype=dtype))


def placed_norms(gradients: Mapping[int, Tensor], count: int, device: torch.device) -> Tensor:
    """Return the norms of gradients that have places among `count`, and below them a 1 where there is one.

    Each place has one owner, the others have zeros there, and in 64 bits no norm is rounded: adding them up is exact.
    """
    found = torch.zeros(2, count, dtype=torch.float64, device=device)
    for place, norm in zip(gradients, norms(list(gradients.values())), strict=True):
        found[0, place], found[1, place] = norm, 1.0
    return found


def total_norm(norms: Tensor | Sequence[Tensor], types: Sequence[torch.dtype]) -> Tensor:
    """Return the norm of `norms`, those of gradients of these types in the model's order, each held exactly.

    To the bit as torch's `get_total_norm` takes it in one process.
    """
    real = [one.to_real() for one in types]
    if len(set(types)) > 1:
        # torch takes one type after the other, in an order of its own that its own grouping knows.
        norms = [norms[place] for inside in foreach.order_by_type(types) for place in inside]
    measured = norms if isinstance(norms, Tensor) else torch.stack(list(norms))
    found: Tensor = torch.linalg.vector_norm(
        measured.to(reduce(torch.promote_types, real or [torch.float32]))
    )
    return found

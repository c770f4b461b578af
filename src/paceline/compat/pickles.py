"""Pickles in which tensors of every type can be read again.

torch pickles a tensor by a kind of storage, and has none for the types that came after those below (uint16 to uint64, float8,
complex32): it writes them, and fails where they are read. Those go as their bytes. Imports torch only where a tensor is.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WITH_STORAGE = frozenset(
    [
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    ]
)


def dumps(value: Any) -> bytes:
    """Return a value as `pickle.loads` reads it."""
    target = io.BytesIO()
    pickler(target).dump(value)
    return target.getvalue()


def pickler(target: io.BytesIO) -> pickle.Pickler:
    """Return a pickler that writes to `target`."""
    made = pickle.Pickler(target)
    made.dispatch_table = reducers(copyreg.dispatch_table)
    return made


def reducers(others: Mapping[type, Callable[[Any], Any]]) -> ChainMap[type, Callable[[Any], Any]]:
    """Return how values are taken apart, by their types: tensors in every type, all else as `others` say."""
    torch = sys.modules.get("torch")
    mine: dict[type, Callable[[Any], Any]] = {} if torch is None else {torch.Tensor: _taken_apart}
    return ChainMap(mine, others)  # type: ignore[arg-type]  # nothing is written to it


def _taken_apart(tensor: Tensor) -> Any:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)
    if name in _WITH_STORAGE or not plain:
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
    bits = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return _put_together, (bits, tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _put_together(bits: Tensor, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    return bits.view(dtype).view(shape).requires_grad_(requires_grad)

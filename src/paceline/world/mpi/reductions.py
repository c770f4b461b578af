"""How values are combined: by MPI, where it has the type; by torch, in the order of the ranks, where it has not.

MPI knows whole numbers, float32, float64 and complex numbers, and adds them in an order of its own. It has no type for
bfloat16, float16 and float8: these are sent as they are and combined by torch, one rank after the other, each addition rounded
to the type as gloo rounds it. So are smallest and largest values of any floating type: there one that is no number wins, as in
torch, on all ranks. Between two ranks there is one order, so the bits are gloo's; float8, which torch does not add,
is added as float32 and rounded each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.compat.python_process_group import premul_factor
from paceline.errors import InputError

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.bool: "C_BOOL",
}
_TRUTHS = {
    "SUM": "LOR",
    "PRODUCT": "LAND",
    "MIN": "LAND",
    "MAX": "LOR",
    "BAND": "LAND",
    "BOR": "LOR",
    "BXOR": "LXOR",
}
_BY_TORCH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


class MpiReduction(NamedTuple):
    """One way to combine values of one type."""

    name: str
    """SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR."""
    dtype: torch.dtype
    by_mpi: bool
    """Whether MPI has the type, and combines it to the same bits on all ranks."""
    factor: float | Tensor | None
    """What values are multiplied with before they are added."""
    mean: bool
    """Whether the sum is divided by the number of ranks."""

    def types(self, mpi: Any) -> tuple[Any, Any]:
        """Return MPI's datatype and operation."""
        operations = _TRUTHS if self.dtype is torch.bool else {"PRODUCT": "PROD"}
        return getattr(mpi, _TYPES[self.dtype]), getattr(mpi, operations.get(self.name, self.name))

    def before(self, tensor: Tensor) -> Tensor:
        """Return what is combined in place of a tensor."""
        return tensor if self.factor is None else tensor * self.factor

    def after(self, tensor: Tensor, size: int) -> None:
        """Turn the sum into the mean, where that was asked for."""
        if self.mean:
            tensor.copy_(_wide(tensor) / size)

    def combine(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parts of all ranks combined, in their order."""
        combined = parts[0]
        for part in parts[1:]:
            combined = _BY_TORCH[self.name](_wide(combined), _wide(part)).to(self.dtype)
        return combined


def choose(op: Any, dtype: torch.dtype) -> MpiReduction:
    """Return the way to combine values of this type; raise InputError where there is none."""
    kind = getattr(op, "op", op)
    name = {dist.ReduceOp.AVG: "SUM", dist.ReduceOp.PREMUL_SUM: "SUM"}.get(kind, kind.name)
    mean, factor = kind == dist.ReduceOp.AVG, premul_factor(op)
    fractional = dtype.is_floating_point or dtype.is_complex
    # Of 0.0 and -0.0, or of a number and none, MPI takes another one on another rank; products of complex numbers may round so.
    by_mpi = dtype in _TYPES and not (
        (dtype.is_floating_point and name in ("MIN", "MAX")) or (dtype.is_complex and name == "PRODUCT")
    )
    text = str(dtype).removeprefix("torch.")
    if (mean or factor is not None) and not fractional:
        raise InputError(f"ReduceOp.{kind.name} of {text} has fractions. Use SUM, and divide as you mean it.")
    if (dtype.is_complex and name in ("MIN", "MAX")) or (fractional and name in ("BAND", "BOR", "BXOR")):
        raise InputError(f"there is no ReduceOp.{name} of {text}. Use SUM or PRODUCT, or another type.")
    if not by_mpi and not dtype.is_floating_point:
        raise InputError(f"values of {text} can be sent, but not combined. Convert them first.")
    return MpiReduction(name, dtype, by_mpi, factor, mean)


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor that torch can add: float8 as float32, everything else as it is."""
    return tensor.float() if tensor.element_size() == 1 and tensor.is_floating_point() else tensor

"""Random numbers for parameters that lie sharded in the workers' memory: those that one process would draw.

Where a loop of its own makes a layer anew between two calls of `run.steps`, `layer.reset_parameters()` writes to DTensors.
On a CPU torch has each worker draw its rows from generators that stand alike, so that all parts get the same numbers; on a
GPU it shifts them, to other numbers than one process draws. Here each worker draws the whole parameter and keeps its part:
for a moment it needs memory for one parameter, and the generators end where those of one process do.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from paceline.compat.dtensor import operator_handlers
from paceline.errors import InputError
from paceline.strategies.sharded import bounds_of, with_part

_aten = torch.ops.aten
_IN_PLACE = (_aten.uniform_.default, _aten.normal_.default, _aten.bernoulli_.float)
_ANEW = (_aten.rand_like.default, _aten.randn_like.default)


def draw_whole() -> None:
    """Make random initialization of a DTensor draw for the whole tensor, in this process."""
    operator_handlers().update({**dict.fromkeys(_IN_PLACE, _draw_into), **dict.fromkeys(_ANEW, _draw_anew)})


def refuse_draws() -> None:
    """Refuse to draw into DTensors, in this process: under fsdp and tp together they are cut out of parts of a weight."""
    operator_handlers().update(dict.fromkeys((*_IN_PLACE, *_ANEW), _refuse))


def _refuse(*_: object) -> NoReturn:
    raise InputError(
        "random numbers are drawn for a weight of which each worker has a part (reset_parameters, torch.randn_like), and under "
        "tp beside fsdp they would differ from those that one process draws. Use --strategy fsdp or ddp."
    )


def _draw_into(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor: DTensor = args[0]
    with torch.no_grad():
        tensor.to_local().copy_(_part(tensor, op, args, kwargs))
    return tensor


def _draw_anew(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor: DTensor = args[0]
    drawn = _part(tensor, op, args, kwargs).clone().to(tensor.to_local().device)
    return with_part(tensor, drawn)


def _part(tensor: DTensor, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return this worker's part of what one process would draw."""
    if any(one.is_partial() for one in tensor.placements):
        raise InputError(
            "random numbers are drawn for a Partial DTensor, whose value is a sum over workers. "
            "Draw them for a plain tensor of its shape."
        )
    local = tensor.to_local()
    # With --offload the parts lie in host memory; one process draws where it computes.
    device = local.device if local.is_meta else tensor.device_mesh.device_type
    whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=local.dtype, device=device)
    return bounds_of(tensor).of(op(whole, *args[1:], **kwargs))

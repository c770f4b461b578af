"""The parameters of a worker's stages sharded among the workers of `fsdp`: whole while a step is computed, rows in between.

A pipeline goes through a stage many times in a step, so its weights are gathered once, before the first micro-batch, and
released after the last. Gradients are summed whole, as everywhere in a pipeline; the optimizer works on this worker's rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.state.chunks import ChunkBounds, TensorMeta
from paceline.strategies.guards.absent import hide, show
from paceline.strategies.memory.offload import without_memory
from paceline.strategies.sharded import LocalPart
from paceline.world import World


class NoRows:
    """Where nobody shares the parameters: they are always whole."""

    def gather(self) -> None:
        """Leave everything as it is."""

    def release(self) -> None:
        """Leave everything as it is."""

    def hand_over(self) -> None:
        """Leave the gradients where the optimizer looks for them."""


class CutRows(NoRows):
    """This worker's rows of each parameter."""

    def __init__(self, place: World, parameters: Mapping[str, nn.Parameter]) -> None:
        """`place` holds the workers that share these parameters, which are whole until they are released."""
        self._place = place
        self._whole = dict(parameters)
        self.parts = {name: _part(parameter, place) for name, parameter in parameters.items()}
        """What the optimizer works on, by name."""
        self._strides = {name: parameter.stride() for name, parameter in parameters.items()}
        self._types = list(dict.fromkeys(parameter.dtype for parameter in self._whole.values()))

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the whole parameters, with one message per dtype."""
        self._show()
        for dtype in self._types:
            names = [name for name, parameter in self._whole.items() if parameter.dtype == dtype]
            lengths = [_chunk(self._whole[name], self._place.size) for name in names]
            mine = torch.zeros(sum(lengths), dtype=dtype, device=self._place.device)
            for name, target in zip(names, torch.split(mine, lengths), strict=True):
                rows = self.parts[name].values.detach().reshape(-1)
                target[: rows.numel()] = rows
            everybody = [torch.split(part, lengths) for part in self._place.comm.all_gather(mine)]
            for place, name in enumerate(names):
                _fill(self._whole[name], self._strides[name], [part[place] for part in everybody])

    def release(self) -> None:
        """Free the whole parameters, and have them refuse to be read; the rows stay."""
        self._show()
        for name, parameter in self._whole.items():
            parameter.grad = None
            parameter.data = without_memory(parameter.shape, parameter.dtype, parameter.device)
            hide(parameter, name, is_elsewhere=False)

    def _show(self) -> None:
        for parameter in self._whole.values():
            show(parameter)

    def hand_over(self) -> None:
        """Set this worker's rows of the gradients for the optimizer."""
        for name, parameter in self._whole.items():
            part = self.parts[name]
            part.values.grad = None if parameter.grad is None else part.bounds.of(parameter.grad)


def _rows(parameter: Tensor) -> int:
    """Return how many rows a parameter has; a single number is one."""
    return int(parameter.shape[0]) if parameter.dim() else 1


def _chunk(parameter: Tensor, workers: int) -> int:
    """Return how many numbers a worker has of a parameter, at most."""
    rows = _rows(parameter)
    return -(-rows // workers) * (parameter.numel() // rows if rows else 0)


def _part(parameter: nn.Parameter, place: World) -> LocalPart:
    rows = _rows(parameter)
    most = -(-rows // place.size)
    start = min(place.rank * most, rows)
    length = min(most, rows - start)
    if parameter.dim():
        bounds = ChunkBounds((start, *[0] * (parameter.dim() - 1)), (length, *parameter.shape[1:]))
        values = bounds.of(parameter.detach()).clone(memory_format=torch.contiguous_format)
    else:
        # A single number cannot be cut: everybody keeps it.
        bounds, values = ChunkBounds((), ()), parameter.detach().clone()
    made = nn.Parameter(values, requires_grad=parameter.requires_grad)
    return LocalPart(made, bounds, TensorMeta(tuple(parameter.shape), parameter.dtype))


def _fill(parameter: nn.Parameter, strides: tuple[int, ...], chunks: list[Tensor]) -> None:
    # Other memory, not the same resized: torch refuses that once anybody has looked at it through numpy.
    parameter.data = parameter.data.new_empty_strided(parameter.shape, strides)
    flat = torch.cat(chunks) if parameter.dim() else chunks[0]
    parameter.copy_(flat[: parameter.numel()].view(parameter.shape))

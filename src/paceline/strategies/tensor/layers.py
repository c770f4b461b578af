"""What stands between split layers: dropout on a part of the features, norms on a part of the sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F

from paceline.compat.modules import children_of
from paceline.errors import InputError

SEQUENCE = 1
"""The side of a batch that is its sequence."""


class SequenceNorm(ParallelStyle):
    """A norm that works on this worker's part of the sequence; the layer after it gathers the parts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, _replicate, _cut_sequence)


class TransposedColumns(ColwiseParallel):
    """Outputs split among workers, of a layer that holds its weight as (inputs, outputs)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, {"weight": Shard(1), "bias": Shard(0)})
        return distribute_module(module, device_mesh, None, _whole_input, self._parts)

    def _parts(self, _: nn.Module, outputs: DTensor, __: DeviceMesh) -> Any:
        return outputs.redistribute(placements=self.output_layouts).to_local()


class TransposedRows(RowwiseParallel):
    """Inputs split among workers, of a layer that holds its weight as (inputs, outputs)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, {"weight": Shard(0), "bias": Replicate()})
        return distribute_module(module, device_mesh, None, _split_input, _sum)


def _distribute(module: nn.Module, mesh: DeviceMesh, layouts: dict[str, Any]) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        split = distribute_tensor(parameter, mesh, [layouts[name]], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))


def _whole_input(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
    return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)


def _split_input(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
    return DTensor.from_local(inputs[0], mesh, [Shard(-1)], run_check=False)


def _sum(_: nn.Module, outputs: DTensor, __: DeviceMesh) -> Any:
    return outputs.redistribute(placements=[Replicate()]).to_local()


def _replicate(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _cut_sequence(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
    whole = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
    # Without a sequence there is nothing to cut but the features, which a norm needs all of.
    return whole if whole.dim() <= SEQUENCE + 1 else whole.redistribute(placements=[Shard(SEQUENCE)])


class Region:
    """Whether the forward pass is between a layer split by columns and one split by rows, and what is split there."""

    def __init__(self, place: int, size: int) -> None:
        self.place, self.size = place, size
        self.widths: set[int] = set()
        """Features that each worker has after the layers passed so far; empty outside."""
        self.heads: set[int] = set()
        """How many heads each worker computes, where attention is split."""

    def enter(self, _: nn.Module, __: Any, output: Tensor) -> None:
        """Note that a layer has made a part of the features."""
        self.widths.add(output.shape[-1])

    def leave(self, *_: Any) -> None:
        """Note that the parts come together."""
        self.widths.clear()

    def side(self, values: Tensor) -> int | None:
        """Return which side of a tensor is split; None outside."""
        if not self.widths:
            return None
        if values.dim() == 4 and values.shape[1] in self.heads:
            return 1
        if values.shape[-1] in self.widths:
            return -1
        raise InputError(
            f"a dropout between split layers got the shape {tuple(values.shape)}, of which tp cannot tell what is split: "
            f"expected {' or '.join(map(str, sorted(self.widths)))} features last. Leave its layers out of tensor_plan()."
        )


class SplitDropout(nn.Dropout):
    """Dropout that zeroes in a part what one process would zero there: it draws the mask of the whole, and cuts it."""

    def __init__(self, layer: nn.Dropout, region: Region) -> None:
        super().__init__(layer.p, layer.inplace)
        self.train(layer.training)
        self._region = region

    def forward(self, values: Tensor) -> Tensor:
        """Drop values of the whole or of this worker's part."""
        side = self._region.side(values) if self.training and self.p > 0 else None
        if side is None:
            return super().forward(values)
        mask = F.dropout(_whole_ones(values, side, self._region.size), self.p)
        length = values.shape[side]
        part = mask.narrow(side, self._region.place * length, length)
        return values.mul_(part) if self.inplace else values * part


def _whole_ones(values: Tensor, side: int, size: int) -> Tensor:
    """Return ones in the shape of the whole, laid out in memory as the part is: masks are drawn in that order."""
    shape = list(values.shape)
    shape[side] *= size
    order = sorted(range(values.dim()), key=values.stride().__getitem__, reverse=True)
    laid_out = torch.ones([shape[each] for each in order], dtype=values.dtype, device=values.device)
    return laid_out.permute([order.index(each) for each in range(values.dim())])


def watch_region(model: nn.Module, opening: list[str], closing: list[str], region: Region) -> None:
    """Hook a model so that the region knows where its forward pass is, and replace its dropouts by ones that ask it."""
    for name in opening:
        model.get_submodule(name).register_forward_hook(region.enter)
    for name in closing:
        model.get_submodule(name).register_forward_pre_hook(region.leave)
    for parent in list(model.modules()):
        # Under every name: a call may come by any of them.
        for name, child in list(children_of(parent).items()):
            if type(child) is nn.Dropout:
                setattr(parent, name, SplitDropout(child, region))

"""State that lies sharded in the workers' memory: which part this worker holds, as plain tensors.

The optimizer works on these plain parts, not on DTensors: what it does to a number depends on no other number, so the
bits are the same, and a step costs none of DTensor's bookkeeping. Parts need no group of workers, so they can be asked for
when the group is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.compat import dtensor
from paceline.compat.modules import buffers_of, parameters_of, unsaved_buffers_of
from paceline.state.chunks import (
    MODEL,
    OPTIMIZER,
    Catalogue,
    ChunkBounds,
    LocalState,
    Read,
    TensorChunk,
    TensorMeta,
    check_saved,
    held_slots,
    read_model,
    read_slots,
)
from paceline.state.optimizer_state import load_optimizer_state, optimizer_state, plain
from paceline.strategies.guards.places import refuse_made_later
from paceline.strategies.memory.offload import HostRows, without_memory


def deal(sizes: Sequence[int], workers: int) -> list[int]:
    """Return an owner for each item: the largest first, each to whoever has least so far."""
    owners = [0] * len(sizes)
    loads = [0] * workers
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        owners[item] = min(range(workers), key=lambda rank: (loads[rank], rank))
        loads[owners[item]] += sizes[item]
    return owners


def bounds_of(tensor: DTensor) -> ChunkBounds:
    """Return the part of a distributed tensor that this worker holds."""
    return ChunkBounds(*dtensor.local_bounds(tensor))


def with_part(tensor: DTensor, part: Tensor) -> DTensor:
    """Return a distributed tensor like another one, of which this worker holds `part`."""
    mesh, places, shape = tensor.device_mesh, tensor.placements, tensor.shape
    return DTensor.from_local(part, mesh, places, run_check=False, shape=shape, stride=tensor.stride())


class LocalPart:
    """What this worker holds of one parameter."""

    def __init__(
        self, values: nn.Parameter, bounds: ChunkBounds, meta: TensorMeta, home: Tensor | None = None
    ) -> None:
        self.values, self.bounds, self.meta = values, bounds, meta
        self.home = home
        """The rows in host memory that `values` only stands for; None where `values` has them."""

    @property
    def rows(self) -> Tensor:
        """The values themselves, wherever they are."""
        return self.values.detach() if self.home is None else self.home

    def cut(self, value: Any) -> Any:
        """Return this part of what an optimizer keeps for the parameter; what has another shape stays as it is."""
        if not isinstance(value, Tensor) or tuple(value.shape) != self.meta.shape:
            return value
        if isinstance(value, DTensor):  # made over rows already, by a constructor
            return value.to_local().detach().to(self.rows.device)
        return self.bounds.of(value).clone()

    @classmethod
    def of(cls, parameter: nn.Parameter) -> LocalPart:
        """Return the part of a parameter, in the very memory that it has; one that is not sharded is a part too."""
        if isinstance(parameter.data, DTensor):
            rows = parameter.data.to_local().detach()
            device = torch.device(parameter.data.device_mesh.device_type)
            away = rows.device.type != device.type
            held = without_memory(rows.shape, rows.dtype, device) if away else rows
            values = nn.Parameter(held, requires_grad=parameter.requires_grad)
            vars(values).update(vars(parameter))
            meta = TensorMeta(tuple(parameter.shape), parameter.dtype)
            return cls(values, bounds_of(parameter.data), meta, rows if away else None)
        return cls(
            parameter, ChunkBounds.whole(parameter.shape), TensorMeta(tuple(parameter.shape), parameter.dtype)
        )


class ShardedTensors:
    """This worker's parts of a model and of its optimizer's state, by name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.by_name = {name: LocalPart.of(parameter) for name, parameter in model.named_parameters()}
        self._first = {id(parameter): name for name, parameter in model.named_parameters()}
        saved = model.state_dict(keep_vars=True)
        check_saved(saved)
        self.saved = {name: self._first.get(id(value)) for name, value in saved.items()}
        """What a saved state holds: for a parameter its first name, for a buffer None."""
        self.host: HostRows | None = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parts as an optimizer sees them."""
        return ((name, part.values) for name, part in self.by_name.items())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parts alone."""
        return (part.values for part in self.by_name.values())

    def part_of(self, parameter: nn.Parameter) -> LocalPart:
        """Return what this worker holds of a parameter of the model."""
        return self.by_name[self._first[id(parameter)]]

    def rewire(self, optimizer: Optimizer, originals: Mapping[int, str]) -> None:
        """Point an optimizer at the parts; `originals` names whole parameters that it may have been made with."""
        names = {**originals, **self._first}
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in names:
                    part = self.by_name[names[id(parameter)]]
                    group["params"][place] = part.values
                    if parameter in optimizer.state:
                        slots = optimizer.state.pop(parameter).items()
                        optimizer.state[part.values] = {slot: part.cut(value) for slot, value in slots}
        homes = {part.values: part.home for part in self.by_name.values() if part.home is not None}
        self.host = HostRows(homes, optimizer) if homes else None

    def renew_buffers(self) -> None:
        """Take up the buffers that there are now: some may have been registered, or taken away, since."""
        found = saved_names(self._model)
        if {name for name, is_buffer in found.items() if is_buffer} == {
            name for name, first in self.saved.items() if first is None
        }:
            return
        self.saved = {
            name: self.saved.get(name) for name, is_buffer in found.items() if is_buffer or name in self.saved
        }

    def check_known(self, catalogue: Catalogue) -> None:
        """Raise where a state holds more of a model than there is of it here."""
        refuse_made_later(catalogue, saved_names(self._model))

    def local_state(self, optimizer: Optimizer, extra_state: Mapping[str, Any]) -> LocalState:
        """Return what this worker holds of model and optimizer; `extra_state` is what is no tensor beside them."""
        described = plain(optimizer_state(cast(nn.Module, self), optimizer))
        slots, others = held_slots(described["state"], self.by_name)
        return LocalState(
            {**self._model_chunks(), **slots},
            {**extra_state, OPTIMIZER: {**described, "state": others}},
            frozenset(self.by_name),
        )

    def load_local_state(
        self, optimizer: Optimizer, catalogue: Catalogue, read: Read, described: Mapping[str, Any]
    ) -> None:
        """Load this worker's part of a state; `described` is the optimizer's, without its tensors."""
        read_model(self._model_chunks(), catalogue, read)
        self._load_optimizer(optimizer, catalogue, read, described)

    def _load_optimizer(
        self, optimizer: Optimizer, catalogue: Catalogue, read: Read, described: Mapping[str, Any]
    ) -> None:
        state = {name: dict(slots) for name, slots in described["state"].items()}
        for name, slots in read_slots(catalogue, read, self.by_name).items():
            state.setdefault(name, {}).update(slots)
        with self.host.at_home() if self.host is not None else nullcontext():
            load_optimizer_state(cast(nn.Module, self), optimizer, {**described, "state": state})

    def _model_chunks(self) -> dict[str, TensorChunk]:
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        parts = {name: self.by_name[first] for name, first in self.saved.items() if first is not None}
        return {
            f"{MODEL}/{name}": TensorChunk(parts[name].rows, parts[name].bounds, parts[name].meta)
            if name in parts
            else TensorChunk.whole(buffers[name].detach())
            for name in self.saved
        }


def saved_names(model: nn.Module) -> dict[str, bool]:
    """Return the names that a state has of a model, in its order, and of each whether it is a buffer's."""
    return {
        f"{path}.{key}".lstrip("."): is_buffer
        for path, module in model.named_modules(remove_duplicate=False)
        for table, is_buffer in ((parameters_of(module), False), (buffers_of(module), True))
        for key, value in table.items()
        if value is not None and not (is_buffer and key in unsaved_buffers_of(module))
    }

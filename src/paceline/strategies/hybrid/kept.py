"""What a worker keeps of the state: a trainer all that is dense, a server some rows of every table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.state.chunks import OPTIMIZER, Catalogue, ChunkBounds, LocalState, Read, TensorMeta
from paceline.state.redistribution import own_bounds
from paceline.strategies.hybrid.tables import explained
from paceline.strategies.placement import Placement
from paceline.strategies.sharded import LocalPart, ShardedTensors


def bounds(rows: int, servers: int) -> list[int]:
    """Return where each server's rows of a table begin, and the end of the last one's."""
    return [server * rows // servers for server in range(servers + 1)]


def part_of(weight: Tensor, start: int, stop: int, device: torch.device) -> LocalPart:
    """Return some rows of a table, in memory of their own."""
    shape = tuple(weight.shape)
    bounds = ChunkBounds((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))
    values = nn.Parameter(bounds.of(weight.detach()).clone(memory_format=torch.contiguous_format).to(device))
    return LocalPart(values, bounds, TensorMeta(shape, weight.dtype))


class KeptState(ShardedTensors):
    """A part of model and optimizer, by name; of the rest the optimizer knows the names only."""

    def __init__(self, model: nn.Module, names: Collection[str], cut: Mapping[str, LocalPart]) -> None:
        """Keep the state of the parameters in `names` whole, and the parts in `cut`; buffers go with the former."""
        super().__init__(model)
        self._keeps_buffers = not cut
        self._standing = {
            name: cut[name].values if name in cut else value for name, value in model.named_parameters()
        }
        self.by_name = {
            name: cut.get(name, part) for name, part in self.by_name.items() if name in {*names, *cut}
        }
        self.saved = {
            name: first
            for name, first in self.saved.items()
            if (first is None and self._keeps_buffers) or first in self.by_name
        }

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return all parameters as the optimizer sees them."""
        return iter(self._standing.items())

    def renew_buffers(self) -> None:
        """Take up the buffers that there are now, where they are kept."""
        if self._keeps_buffers:
            super().renew_buffers()

    def wire(self, optimizer: Optimizer) -> None:
        """Make an optimizer work on what is kept, and drop its state of the rest."""
        known = dict(self._model.named_parameters())
        cut = {known[name]: part for name, part in self.by_name.items() if part.values is not known[name]}
        for parameter, part in cut.items():
            slots = optimizer.state.pop(parameter, None)
            if slots is not None:
                optimizer.state[part.values] = {
                    slot: _cut(value, part) if isinstance(value, Tensor) else value
                    for slot, value in slots.items()
                }
        _replace(optimizer, lambda one: cut[one].values if one in cut else one)
        self.release(optimizer)

    def unwire(self, optimizer: Optimizer) -> None:
        """Put the model's own parameters back into the optimizer."""
        known = dict(self._model.named_parameters())
        here = {part.values: known[name] for name, part in self.by_name.items()}
        for part in self.by_name.values():
            optimizer.state.pop(part.values, None)
        _replace(optimizer, lambda one: here.get(one, one))

    def release(self, optimizer: Optimizer) -> None:
        """Drop the optimizer state of parameters that other workers keep."""
        kept = {id(part.values) for part in self.by_name.values()}
        for name, parameter in self._standing.items():
            if name not in self.by_name and id(parameter) not in kept:
                optimizer.state.pop(parameter, None)

    def load_local_state(
        self, optimizer: Optimizer, catalogue: Catalogue, read: Read, described: Mapping[str, Any]
    ) -> None:
        """Load this worker's part of a state."""
        slots = {name: one for name, one in described["state"].items() if name in self.by_name}
        super().load_local_state(optimizer, catalogue, read, {**described, "state": slots})
        self.release(optimizer)


class KeptPlacement(Placement):
    """The part of the state that a trainer or a server keeps."""

    substitutes = False

    kept: KeptState

    def explained(self, error: BaseException) -> InputError | None:
        """Return the words for what nobody can do to weights that are elsewhere."""
        return explained(error)

    def local_state(self) -> LocalState:
        """Return what this worker keeps; nobody is asked."""
        self.kept.renew_buffers()
        return self.kept.local_state(self.optimizer, {})

    def wanted(self, catalogue: Catalogue) -> dict[str, ChunkBounds]:
        """Return the bounds of what this worker keeps."""
        return own_bounds(self.local_state().chunks, catalogue)

    def load_local_state(self, catalogue: Catalogue, read: Read, extra_state: Mapping[str, Any]) -> None:
        """Load this worker's part of a state."""
        self.kept.renew_buffers()
        self.kept.check_known(catalogue)
        self.kept.load_local_state(self.optimizer, catalogue, read, extra_state[OPTIMIZER])


def check_slots(optimizer: Optimizer, parts: Sequence[LocalPart]) -> None:
    """Refuse an optimizer that keeps more for a table than rows and numbers."""
    for part in parts:
        for slot, value in optimizer.state.get(part.values, {}).items():
            if isinstance(value, Tensor) and (
                value.is_sparse or (value.dim() and value.shape != part.values.shape)
            ):
                kind = "a sparse tensor" if value.is_sparse else f"a tensor of shape {tuple(value.shape)}"
                raise InputError(
                    f"{type(optimizer).__name__} keeps {slot} as {kind}, which servers cannot shard by rows. "
                    "Use Adagrad, or SGD without momentum."
                )


def checked(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer; raise for one that takes no gradients of a few rows."""
    known = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
    if not isinstance(optimizer, known) and not getattr(optimizer, "elementwise", False):
        name = type(optimizer).__name__
        raise InputError(
            f"--strategy hybrid cuts tables up by rows, and {name} takes no sparse gradients or may look across rows. "
            f"Use Adagrad or SGD; if {name} does neither, say so in its class: elementwise = True."
        )
    return optimizer


def _cut(value: Tensor, part: LocalPart) -> Tensor:
    if tuple(value.shape) != part.meta.shape:
        return value
    return part.bounds.of(value).clone().to(part.values.device)  # made with the model, before it had a device


def _replace(optimizer: Optimizer, instead: Callable[[nn.Parameter], nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [instead(one) for one in group["params"]]

"""What one worker keeps of a run's state when the model is cut into stages; all of it, until the cut is made.

The optimizer is made over the whole model, so its groups are what the task says; what another worker holds is then taken out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.state.chunks import (
    MODEL,
    OPTIMIZER,
    Catalogue,
    LocalState,
    Read,
    TensorChunk,
    assemble,
    check_saved,
    collect,
    held_slots,
    read_model,
    read_slots,
    survey,
)
from paceline.state.optimizer_state import load_optimizer_state, optimizer_state, plain
from paceline.strategies.guards.absent import drop, is_absent, present
from paceline.strategies.pipeline.rows import NoRows, Part
from paceline.world import World, all_gather_object


class StageState:
    """The tensors and the optimizer of one worker."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        saved = model.state_dict()
        check_saved(saved)
        self.names = list(saved)
        """What the whole model saves, in its order."""
        self.groups = [group["params"] for group in optimizer_state(model, optimizer)["groups"]]
        """The names of the whole model's parameters, by groups of the optimizer."""
        self._parts = {name: Part.whole(one) for name, one in model.named_parameters()}

    def move(self, names: frozenset[str], device: torch.device) -> None:
        """Bring the named tensors to the device; they stay the same parameters."""
        for name, parameter in self.model.named_parameters():
            if name in names:
                parameter.data = parameter.data.to(device)
        for path, module in self.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if f"{path}.{name}".lstrip(".") in names:
                    setattr(module, name, buffer.to(device))

    def keep(self, names: frozenset[str], device: torch.device) -> None:
        """Hold on to the named tensors alone, which are on the device."""
        saved = self.local_state()
        known = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [one for one in group["params"] if known.get(id(one), "") in names]
        drop(self.model, names, device)
        self._parts = {name: Part.whole(one) for name, one in present(self.model.named_parameters())}
        self.optimizer.state.clear()
        self._load_optimizer(
            {key: chunk.meta for key, chunk in saved.chunks.items()},
            lambda key, bounds: bounds.of(saved.chunks[key].values),
            saved.rest[OPTIMIZER],
        )

    def cut_up(self, rows: NoRows) -> None:
        """Hold on to some rows of each parameter alone."""
        saved = self.local_state()
        self._parts |= rows.parts()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [self._parts[names[id(one)]].values for one in group["params"]]
        self.optimizer.state.clear()
        self._load_optimizer(
            {key: chunk.meta for key, chunk in saved.chunks.items()},
            lambda key, bounds: bounds.of(saved.chunks[key].values),
            saved.rest[OPTIMIZER],
        )

    # Parameters by name, as the functions of `state` ask a module for them.

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return what the optimizer works on."""
        return ((name, part.values) for name, part in self._parts.items())

    def _described(self) -> dict[str, Any]:
        described: dict[str, Any] = plain(optimizer_state(cast(nn.Module, self), self.optimizer))
        return described

    def _load_optimizer(self, catalogue: Catalogue, read: Read, described: Mapping[str, Any]) -> None:
        """Take over this worker's part of the optimizer's state."""
        state: dict[str, dict[str, Any]] = {
            name: dict(slots) for name, slots in described["state"].items() if name in self._parts
        }
        for name, slots in read_slots(catalogue, read, self._parts).items():
            state.setdefault(name, {}).update(slots)
        groups = [
            {**group, "params": [name for name in group["params"] if name in self._parts]}
            for group in described["groups"]
        ]
        load_optimizer_state(cast(nn.Module, self), self.optimizer, {"state": state, "groups": groups})

    # As the contract of a placement has it.

    def local_state(self) -> LocalState:
        """Return what this worker holds."""
        described = self._described()
        slots, others = held_slots(described["state"], self._parts)
        groups = [
            {**group, "params": names} for group, names in zip(described["groups"], self.groups, strict=True)
        ]
        return LocalState({**self._model_chunks(), **slots}, {OPTIMIZER: {"state": others, "groups": groups}})

    def _model_chunks(self) -> dict[str, TensorChunk]:
        known = {id(value): name for name, value in self.model.named_parameters()}
        chunks: dict[str, TensorChunk] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            part = self._parts.get(known.get(id(value), ""))
            if part is not None:
                chunks[f"{MODEL}/{name}"] = TensorChunk(part.values.detach(), part.bounds, part.meta)
            elif not is_absent(value):
                chunks[f"{MODEL}/{name}"] = TensorChunk.whole(value.detach())
        return chunks

    def gathered(self, held: LocalState, world: World) -> dict[str, Any]:
        """Put the whole state together, on all workers, in the order in which one process has it."""
        found = dict(collect(world, held.chunks, survey(world, held.chunks)))
        simple: dict[str, dict[str, Any]] = {}
        for part in all_gather_object(world.comm, held.rest[OPTIMIZER]["state"]):
            simple |= part
        order = [name for names in self.groups for name in names if name in simple]
        described = {**held.rest[OPTIMIZER], "state": {name: simple[name] for name in order}}
        whole = assemble(found, {**held.rest, OPTIMIZER: described})
        return {**whole, MODEL: {name: whole[MODEL][name] for name in self.names}}

    def load_local_state(self, catalogue: Catalogue, read: Read, rest: Mapping[str, Any]) -> None:
        """Take over this worker's part of a whole state."""
        read_model(self._model_chunks(), catalogue, read)
        self._load_optimizer(catalogue, read, rest[OPTIMIZER])

"""What one worker keeps of a run's state when the model is cut into stages; all of it, until the cut is made.

The optimizer is made over the whole model, so its groups are what the task says; what another worker holds is then taken out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.state.chunks import (
    MODEL,
    OPTIMIZER,
    Catalogue,
    LocalState,
    Read,
    assemble,
    collect,
    survey,
)
from paceline.state.optimizer_state import optimizer_state
from paceline.strategies.guards.absent import drop
from paceline.strategies.sharded import LocalPart, ShardedTensors
from paceline.world import World, all_gather_object


class StageState(ShardedTensors):
    """The tensors of one worker, and their optimizer's state."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model)
        self._names = list(self.saved)
        """What the whole model saves, in its order."""
        self._groups = [group["params"] for group in optimizer_state(model, optimizer)["groups"]]
        """The names of the whole model's parameters, by groups of the optimizer."""

    def work_with(self, model: nn.Module) -> None:
        """Use other modules that have the same tensors from now on."""
        self._model = model

    def keep(self, names: frozenset[str], optimizer: Optimizer, device: torch.device) -> None:
        """Bring the named tensors to the device, where they stay the same parameters, and release all others."""
        for name, parameter in self._model.named_parameters():
            if name in names:
                parameter.data = parameter.data.to(device)
        moved: dict[Tensor, Tensor] = {}
        for path, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if f"{path}.{name}".lstrip(".") in names:  # one that two modules hold stays one
                    setattr(module, name, moved.setdefault(buffer, buffer.to(device)))
        saved = self.local_state(optimizer, {})
        known = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for group in optimizer.param_groups:
            group["params"] = [one for one in group["params"] if known.get(id(one), "") in names]
        drop(self._model, names, device)
        self.by_name = {name: part for name, part in self.by_name.items() if name in names}
        self.saved = {name: first for name, first in self.saved.items() if name in names}
        self._load_own(optimizer, saved)

    def keep_rows(self, rows: Mapping[str, LocalPart], optimizer: Optimizer) -> None:
        """Hold on to some rows of each parameter alone."""
        saved = self.local_state(optimizer, {})
        self.by_name |= rows
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for group in optimizer.param_groups:
            group["params"] = [self.by_name[names[id(one)]].values for one in group["params"]]
        self._load_own(optimizer, saved)

    def _load_own(self, optimizer: Optimizer, saved: LocalState) -> None:
        """Load into the optimizer the part of a former state that belongs to what this worker holds now."""
        optimizer.state.clear()
        self._load_optimizer(
            optimizer,
            {key: chunk.meta for key, chunk in saved.chunks.items()},
            lambda key, bounds: bounds.of(saved.chunks[key].values),
            saved.extra_state[OPTIMIZER],
        )

    def _load_optimizer(
        self, optimizer: Optimizer, catalogue: Catalogue, read: Read, described: Mapping[str, Any]
    ) -> None:
        state = {name: slots for name, slots in described["state"].items() if name in self.by_name}
        groups = [
            {**group, "params": [name for name in group["params"] if name in self.by_name]}
            for group in described["groups"]
        ]
        super()._load_optimizer(optimizer, catalogue, read, {"state": state, "groups": groups})

    def local_state(self, optimizer: Optimizer, extra_state: Mapping[str, Any]) -> LocalState:
        """Return what this worker holds; the groups are those of the whole model."""
        held = super().local_state(optimizer, extra_state)
        described = held.extra_state[OPTIMIZER]
        groups = [
            {**group, "params": names} for group, names in zip(described["groups"], self._groups, strict=True)
        ]
        return replace(held, extra_state={**held.extra_state, OPTIMIZER: {**described, "groups": groups}})

    def gathered(self, held: LocalState, world: World) -> dict[str, Any]:
        """Put the whole state together, on all workers, in the order in which one process has it."""
        found = dict(collect(world, held.chunks, survey(world, held.chunks)))
        simple: dict[str, dict[str, Any]] = {}
        for part in all_gather_object(world.comm, held.extra_state[OPTIMIZER]["state"]):
            simple |= part
        order = [name for names in self._groups for name in names if name in simple]
        described = {**held.extra_state[OPTIMIZER], "state": {name: simple[name] for name in order}}
        whole = assemble(found, {**held.extra_state, OPTIMIZER: described})
        return {**whole, MODEL: {name: whole[MODEL][name] for name in self._names}}

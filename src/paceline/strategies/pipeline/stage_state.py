"""What one worker keeps of a run's state when the model is cut into stages; all of it, until the cut is made.

The optimizer is made over the whole model, so its groups are what the task says; what another worker holds is then taken out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import CheckpointError
from paceline.state.chunks import (
    MODEL,
    OPTIMIZER,
    Catalogue,
    ChunkBounds,
    LocalState,
    Read,
    TensorChunk,
    TensorMeta,
    assemble,
    check_saved,
    collect,
    slots_of,
    survey,
)
from paceline.state.optimizer_state import load_optimizer_state, optimizer_state, plain
from paceline.strategies.absent import drop, is_absent, present
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
        saved = self.held()
        known = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [one for one in group["params"] if known.get(id(one), "") in names]
        drop(self.model, names, device)
        self._parts = {name: Part.whole(one) for name, one in present(self.model.named_parameters())}
        self.optimizer.state.clear()
        self._load_optimizer(
            {key: piece.form for key, piece in saved.pieces.items()},
            lambda key, box: box.of(saved.pieces[key].values),
            saved.rest[OPTIMIZER],
        )

    def cut_up(self, rows: NoRows) -> None:
        """Hold on to some rows of each parameter alone."""
        saved = self.held()
        self._parts |= rows.parts()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [self._parts[names[id(one)]].values for one in group["params"]]
        self.optimizer.state.clear()
        self._load_optimizer(
            {key: piece.form for key, piece in saved.pieces.items()},
            lambda key, box: box.of(saved.pieces[key].values),
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
        state: dict[str, dict[str, Any]] = {}
        for name, part in self._parts.items():
            slots = dict(described["state"].get(name, {}))
            for slot, form in slots_of(catalogue, name).items():
                box = part.box if form.shape == part.form.shape else ChunkBounds.whole(form.shape)
                slots[slot] = read(f"{OPTIMIZER}/{name}/{slot}", box).clone()
            if slots:
                state[name] = slots
        groups = [
            {**group, "params": [name for name in group["params"] if name in self._parts]}
            for group in described["groups"]
        ]
        load_optimizer_state(cast(nn.Module, self), self.optimizer, {"state": state, "groups": groups})

    # As the contract of a placement has it.

    def held(self) -> LocalState:
        """Return what this worker holds."""
        known = {id(value): name for name, value in self.model.named_parameters()}
        pieces: dict[str, TensorChunk] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            part = self._parts.get(known.get(id(value), ""))
            if part is not None:
                pieces[f"{MODEL}/{name}"] = TensorChunk(part.values.detach(), part.box, part.form)
            elif not is_absent(value):
                pieces[f"{MODEL}/{name}"] = TensorChunk.whole(value.detach())
        described, others = self._described(), dict[str, dict[str, Any]]()
        for name, slots in described["state"].items():
            others[name] = {slot: value for slot, value in slots.items() if not isinstance(value, Tensor)}
            part = self._parts[name]
            for slot, value in slots.items():
                if isinstance(value, Tensor):
                    cut = value.dim() and value.shape == part.values.shape
                    pieces[f"{OPTIMIZER}/{name}/{slot}"] = (
                        TensorChunk(value, part.box, TensorMeta(part.form.shape, value.dtype))
                        if cut
                        else TensorChunk.whole(value)
                    )
        groups = [
            {**group, "params": names} for group, names in zip(described["groups"], self.groups, strict=True)
        ]
        return LocalState(pieces, {OPTIMIZER: {"state": others, "groups": groups}})

    def gathered(self, held: LocalState, world: World) -> dict[str, Any]:
        """Put the whole state together, on all workers, in the order in which one process has it."""
        found = dict(collect(world, held.pieces, survey(world, held.pieces)))
        simple: dict[str, dict[str, Any]] = {}
        for part in all_gather_object(world.comm, held.rest[OPTIMIZER]["state"]):
            simple |= part
        order = [name for names in self.groups for name in names if name in simple]
        described = {**held.rest[OPTIMIZER], "state": {name: simple[name] for name in order}}
        whole = assemble(found, {**held.rest, OPTIMIZER: described})
        return {**whole, MODEL: {name: whole[MODEL][name] for name in self.names}}

    @torch.no_grad()
    def take(self, catalogue: Catalogue, read: Read, rest: Mapping[str, Any]) -> None:
        """Take over this worker's part of a whole state."""
        for key, piece in self.held().pieces.items():
            if key.startswith(f"{MODEL}/"):
                form = catalogue.get(key)
                if form is None or form.shape != piece.form.shape:
                    there = "is missing" if form is None else f"has the shape {form.shape}"
                    raise CheckpointError(
                        f"{key.partition('/')[2]} {there} in the state, and has the shape {piece.form.shape} here. "
                        "Use the task that wrote it."
                    )
                piece.values.copy_(read(key, piece.box))
        self._load_optimizer(catalogue, read, rest[OPTIMIZER])

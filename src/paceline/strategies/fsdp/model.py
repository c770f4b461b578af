"""Makes the model of a sharded run, without any worker ever holding all of it where that is possible.

And turns it back into the user's own module, for a group that has formed anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from paceline.compat import fsdp
from paceline.errors import InputError
from paceline.strategies.base import StrategyInputs
from paceline.strategies.buffers.batchnorm import synchronise
from paceline.strategies.compiled import Compiler, compile_blocks
from paceline.strategies.fsdp.param_groups import Listener, ParamGroup, shard_model
from paceline.strategies.guards.overlaps import overlap_in
from paceline.strategies.guards.refusals import refuse_hooks, refuse_references, refuse_sparse
from paceline.strategies.memory.blocks import find_blocks
from paceline.strategies.memory.meta_init import RecordedInit, record_init
from paceline.strategies.placement import check_same_start, spread_weights, sum_of_start
from paceline.strategies.sharded import LocalPart, ShardedTensors
from paceline.world import World, all_gather_object


@dataclass(frozen=True)
class Sharded:
    """A model that is sharded, and how it came to be."""

    model: nn.Module
    param_groups: list[ParamGroup]
    originals: dict[int, str]
    """The parameters as the user made them, where an optimizer may have been made over them."""
    notes: list[str]


def _recorded(inputs: StrategyInputs, data: World) -> tuple[RecordedInit | None, str]:
    """Write the construction down on all workers; where it cannot be on one of them, all make the model plainly."""
    if not inputs.can_rebuild:
        return None, ""
    made, reason = record_init(inputs.make_model)
    told: list[str] = (
        all_gather_object(data.comm, "" if made is not None else reason) if data.size > 1 else [reason]
    )
    return (None, max(told)) if any(told) else (made, reason)


def make_sharded(inputs: StrategyInputs, data: World, place: World, listener: Listener) -> Sharded:
    """Make the model and cut it up among the workers of `place`; `data` is everybody that data is dealt to."""
    made, reason = _recorded(inputs, data)
    model = made.model if made is not None else inputs.make_model().to(data.device)
    for refuse in (refuse_sparse, refuse_hooks, refuse_references):
        refuse(model, "fsdp")
    line = made.overlap if made is not None else overlap_in(model, held=True)
    if line is not None:
        raise InputError(line)
    kept = {name: fsdp.notes_on(parameter) for name, parameter in model.named_parameters()}
    notes = [] if not reason else [f"every worker made the whole model before it was sharded: {reason}"]
    if inputs.sync_batchnorm:
        synchronise(model, data.comm, inputs.shards)
    if made is None and not inputs.weights_in_sync:
        spread_weights(model, data)  # rows of models that differ would make none of them
    originals = {} if inputs.can_rebuild else {id(value): name for name, value in model.named_parameters()}
    # With control flow that depends on data, workers could gather different blocks: the whole model is one group then.
    blocks = (
        find_blocks(model, inputs.structure)
        if not inputs.find_unused_parameters or inputs.structure.blocks
        else {}
    )
    if not blocks and inputs.structure.blocks is None:
        notes.append(_note_of_one_group(model, inputs))
    # Named by generation: torch remembers shapes by mesh, and in the next group this worker may have another rank.
    mesh = DeviceMesh.from_group(_group(place), data.device.type, mesh_dim_names=(f"fsdp-{data.generation}",))
    param_groups = shard_model(model, blocks, mesh, inputs.tuning, listener)
    if made is not None:
        _fill(model, made, data, offload=inputs.tuning.offload, compared=not inputs.weights_in_sync)
    for name, parameter in model.named_parameters():
        # What the user has noted there, for the optimizer's groups say; cutting and filling make other objects.
        vars(parameter).update(kept[name])
    # Now, because a worker may have to follow others before its own first pass.
    fsdp.find_root(model)
    for param_group in param_groups:
        param_group.keep(False)  # until a batch begins
    if inputs.compile:
        compile_blocks(
            blocks.values() or [model], Compiler(data, inputs.note, repeatable=False, in_pieces=False)
        )
    return Sharded(model, param_groups, originals, notes)


def _note_of_one_group(model: nn.Module, inputs: StrategyInputs) -> str:
    """Return what a user should know of a model that is gathered whole."""
    if inputs.find_unused_parameters and find_blocks(model, inputs.structure):
        cause = "with find_unused_parameters batches may take different ways through it"
    else:
        cause = "no block of it repeats"
    return (
        f"the whole model is gathered at once in each pass, because {cause}: between passes each worker keeps its rows, but in "
        "them no memory is spared. Name blocks that every batch goes through in block_modules()."
    )


def _group(place: World) -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = place.comm.group
    if group is None:
        raise RuntimeError("a model is sharded among several workers")
    return group


def _fill(model: nn.Module, made: RecordedInit, data: World, *, offload: bool, compared: bool) -> None:
    """Allocate the rows, with the values that a plain construction would have given them; `compared` with those of the others."""
    device = data.device
    sums: dict[str, int] = {}
    _give_memory(model, device, torch.device("cpu") if offload else device)
    parts = {name: LocalPart.of(parameter) for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def keep(name: str, whole: Tensor) -> None:
        if name in parts:
            if compared:
                sums[name] = sum_of_start(whole)
            parts[name].rows.copy_(parts[name].bounds.of(whole))
        else:
            buffers[name].copy_(whole)

    made.fill(keep)
    if compared:
        check_same_start(sums, data)


def _give_memory(model: nn.Module, device: torch.device, home: torch.device) -> None:
    """Do what torch's `to_empty` does, but leave a buffer that several modules share one; rows are kept at `home`."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            places.setdefault(id(buffer), []).append((module, name))
    model.to_empty(device=home)
    for (first, name), *others in places.values():
        if home.type != device.type:
            setattr(first, name, torch.empty_like(getattr(first, name), device=device))
        for module, other in others:
            setattr(module, other, getattr(first, name))


def unwrap_model(model: nn.Module, optimizer: Optimizer, local: ShardedTensors) -> None:
    """Put whole parameters back into a model, without values: the state is handed over to it afterwards."""
    owners = {
        name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        for name, _ in model.named_parameters(remove_duplicate=False)
    }
    shared = {name: first for name, first in local.saved.items() if first is not None}
    for module in list(model.modules()):
        if isinstance(module, FSDPModule):
            fsdp.strip(module)
    made: dict[str, nn.Parameter] = {}
    for name, (module, attribute) in owners.items():
        first = shared.get(name, name)
        part = local.by_name[first]
        if first not in made:
            whole = torch.zeros(part.meta.shape, dtype=part.meta.dtype, device=part.values.device)
            made[first] = nn.Parameter(whole, requires_grad=part.values.requires_grad)
        setattr(module, attribute, made[first])
    back = {id(part.values): made[name] for name, part in local.by_name.items()}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [back.get(id(value), value) for value in group["params"]]

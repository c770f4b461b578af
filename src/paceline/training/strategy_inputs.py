"""What a strategy is given: the parts of a new run, and of one that goes on in another group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from paceline import strategies
from paceline.errors import InputError
from paceline.state.chunks import check_saved
from paceline.strategies.base import Exactness, StrategyInputs
from paceline.strategies.buffers.buffers import Rule
from paceline.strategies.precision import Precision
from paceline.strategies.replica import Replica
from paceline.strategies.structure import Structure
from paceline.task import Task
from paceline.training.options import RunOptions
from paceline.training.several import (
    GivenModel,
    GivenOptimizer,
    GivenScheduler,
    MakeModel,
    check_several,
    joined_models,
    joined_optimizers,
    joined_schedules,
    with_outside,
)
from paceline.training.user_loop.schedules import noted
from paceline.world import seeds

SEVERAL = "Several models take a loop of their own, run.prepare({name: model, ...}, {name: optimizer, ...}): a Task has one."
BY_NAME = (
    "Several models and optimizers are given by name, in one call: "
    'run.prepare({"generator": g, "discriminator": d}, {"generator": opt_g, "discriminator": opt_d}).'
)


def new_parts(
    options: RunOptions,
    exactness: Exactness,
    device: torch.device,
    model: GivenModel,
    optimizer: GivenOptimizer,
    scheduler: GivenScheduler,
    buffers: Mapping[str, Rule] | None,
    structure: Structure | None,
) -> StrategyInputs:
    """Put together what the user gave and what the run was asked for."""
    entry, several = strategies.entry(options.strategy), isinstance(optimizer, Mapping)
    if several or isinstance(model, Mapping):
        check_several(options, entry, with_optimizers=several)
    model, optimizer = joined_models(model), joined_optimizers(optimizer)
    schedule = joined_schedules(scheduler)
    _check_one(model, optimizer, schedule)
    given, rules, structure = isinstance(model, nn.Module), buffers or {}, structure or Structure()
    if isinstance(model, nn.Module):
        if isinstance(optimizer, Optimizer):
            model, rules, structure = with_outside(options, entry, model, optimizer, rules, structure)
        _check_model(model, saved=options.out is not None)
    return StrategyInputs(
        make_model=(lambda: model)
        if isinstance(model, nn.Module)
        else _seeded(model, options.seed, saved=options.out is not None),
        can_rebuild=not (given or isinstance(optimizer, Optimizer)),
        structure=structure,
        tuning=options.tuning,
        make_optimizer=(lambda _: optimizer) if isinstance(optimizer, Optimizer) else optimizer,
        make_scheduler=noted(schedule if callable(schedule) else (lambda _: schedule)),
        precision=Precision(options.precision, device),
        shards=options.total_shards,
        threads=options.workers if entry.threaded else 1,
        several=several,
        exactness=exactness,
        buffer_rules=rules,
        sync_batchnorm=options.sync_batchnorm,
        transport=options.transport,
        compile=options.compile,
        cuda_graph=options.cuda_graph,
        find_unused_parameters=options.find_unused_parameters,
    )


def structure_of(task: Task) -> Structure:
    """Return what a task says of its model's structure."""
    return Structure(
        blocks=task.block_modules(), tensor_plan=task.tensor_plan(), stages=task.pipeline_stages()
    )


def _seeded(make: MakeModel, seed: int, *, saved: bool) -> MakeModel:
    """Make the model with the same weights every time."""

    def made() -> nn.Module:
        seeds.seed_everything(seeds.derive(seed, "model"))
        model = make()
        if not isinstance(model, nn.Module):
            more = f" {SEVERAL}" if isinstance(model, Mapping) else ""
            raise InputError(f"the model is a {type(model).__name__}, not a torch.nn.Module.{more}")
        _check_model(model, saved=saved)
        return model

    return made


def _check_one(model: object, optimizer: object, scheduler: object) -> None:
    """Raise for a list of models, as other libraries take, and for whatever else neither is one nor makes one."""
    for what, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not (isinstance(given, kind) or callable(given)):
            raise InputError(f"run.prepare was given a {type(given).__name__} as its {what}. {BY_NAME}")
    if isinstance(scheduler, list | tuple):
        raise InputError(
            f"run.prepare was given a {type(scheduler).__name__} as its scheduler. A run has one: chain several with "
            "torch.optim.lr_scheduler.ChainedScheduler or SequentialLR."
        )


def _check_model(model: nn.Module, *, saved: bool) -> None:
    """Raise before the first step for a model that cannot be trained or saved: at the end all work would be lost."""
    _check_bare(model)
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(parameter):
            raise InputError(
                f"{name} has no size yet (a lazy module finds it out in its first pass). Call the model once with an example "
                "before it is returned or prepared: model(torch.zeros(1, 16))."
            )
        _check_memory(name, parameter)
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if id(buffer) in known:
            raise InputError(
                f"the buffer {name} is the parameter {known[id(buffer)]}, and what a step does to buffers it cannot do to "
                f"one that is trained. Leave the buffer out, and read {known[id(buffer)]} in forward."
            )
    state = model.state_dict()
    check_saved(state)
    if saved:
        # Loads safetensors: nobody needs it who saves nothing.
        from paceline.checkpoint.formats import FORMATS, WRITTEN

        written = FORMATS[WRITTEN]
        for name, value in state.items():
            if not written.holds(value.dtype):
                raise InputError(
                    f"{name} is of type {value.dtype}, which no checkpoint can hold ({written.name} has no such type). Keep it "
                    "in another type, or train without --out."
                )


def _check_memory(name: str, tensor: Tensor) -> None:
    """Raise for a tensor that cannot be written to, sent or saved number by number."""
    if tensor.layout is not torch.strided:
        raise InputError(
            f"{name} is a sparse tensor ({str(tensor.layout).removeprefix('torch.')}), which is not sent to other workers nor "
            "saved. Register its indices and values as dense buffers, and make the sparse tensor of them in forward."
        )
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise InputError(
            f"{name} is expanded: several of its numbers lie in one place of memory, so nothing can be loaded into it. Register "
            f"it with memory of its own: {name.rpartition('.')[2]}.clone()."
        )


def _check_bare(model: nn.Module) -> None:
    """Raise for a model that somebody else makes parallel already: its gradients would be combined twice."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise InputError(
            f"the model is a {type(model).__name__}, which combines gradients itself. Give the bare module (model.module), and "
            "choose a strategy."
        )


def carried_inputs(inputs: StrategyInputs, before: Replica) -> StrategyInputs:
    """Continue with the very model, optimizer, schedule and scaler of the replica that the group before had."""
    return replace(
        inputs,
        previous=before,
        scaler=renewed_scaler(inputs.precision, before.scaler),
        weights_in_sync=True,
    )


def renewed_scaler(precision: Precision, before: torch.amp.GradScaler | None) -> torch.amp.GradScaler | None:
    """Return a scaler with the state of an earlier one, without what an interrupted step left in it after `unscale_`."""
    made = precision.scaler()
    if made is not None and before is not None:
        made.load_state_dict(before.state_dict())
    return made

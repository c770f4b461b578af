"""Joins models, optimizers and schedules that a run was given by name, so that all else sees one of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import InputError, UnknownNameError
from paceline.strategies.buffers.buffers import Rule
from paceline.strategies.catalogue import StrategyEntry
from paceline.strategies.in_turns.models import Models, check_names
from paceline.strategies.in_turns.optimizers import Optimizers
from paceline.strategies.in_turns.outside import MODEL, WithOutside, parameters_outside
from paceline.strategies.in_turns.schedules import Schedules
from paceline.strategies.structure import Structure
from paceline.training.options import RunOptions

MakeModel: TypeAlias = Callable[[], nn.Module]
MakeOptimizer: TypeAlias = Callable[[nn.Module], Optimizer]
MakeScheduler: TypeAlias = Callable[[Optimizer], LRScheduler | None]
GivenModel: TypeAlias = nn.Module | MakeModel | Mapping[str, nn.Module | MakeModel]
GivenOptimizer: TypeAlias = Optimizer | MakeOptimizer | Mapping[str, Optimizer | MakeOptimizer]
GivenScheduler: TypeAlias = LRScheduler | MakeScheduler | Mapping[str, LRScheduler | MakeScheduler] | None


def joined_models(given: GivenModel) -> nn.Module | MakeModel:
    """Return several models as one, or a function that makes them as one."""
    if not isinstance(given, Mapping):
        return given
    check_names(given)
    models = {name: one for name, one in given.items() if isinstance(one, nn.Module)}
    makers = {name: one for name, one in given.items() if name not in models}
    for name, one in makers.items():
        if not callable(one):
            raise InputError(
                f"the model {name!r} is a {type(one).__name__}. Give a torch.nn.Module, or a function that makes one."
            )
    if models and makers:
        raise InputError(
            f"the model {next(iter(models))!r} is made, and {next(iter(makers))!r} is a function that makes one. Give all "
            "models, or functions for all."
        )
    return Models(models) if models else lambda: Models({name: make() for name, make in makers.items()})


def joined_optimizers(given: GivenOptimizer) -> Optimizer | MakeOptimizer:
    """Return several optimizers as one, or a function that makes them as one: each of its own model, or of the one there is."""
    if not isinstance(given, Mapping):
        return given
    check_names(given)
    made = {name: one for name, one in given.items() if isinstance(one, Optimizer)}
    if len(made) == len(given):
        return Optimizers(made)
    for name, one in given.items():
        if name not in made and not callable(one):
            raise InputError(
                f"the optimizer {name!r} is a {type(one).__name__}. Give a torch.optim.Optimizer, or a function of the model."
            )
    if made:
        raise InputError(
            f"the optimizer {next(iter(made))!r} is made, and others are functions of the model. Give all "
            "optimizers, or functions for all."
        )

    def make(model: nn.Module) -> Optimizer:
        if isinstance(model, Models):
            for name in given:
                if name not in model:
                    raise UnknownNameError("model for the optimizer", name, list(model))
        return Optimizers(
            {name: one(model[name] if isinstance(model, Models) else model) for name, one in given.items()}  # type: ignore[operator]
        )

    return make


def joined_schedules(given: GivenScheduler) -> LRScheduler | MakeScheduler | None:
    """Return a function that makes several schedules as one."""
    if not isinstance(given, Mapping):
        return given
    named = dict(given.items())

    def make(optimizer: Optimizer) -> Schedules:
        if not isinstance(optimizer, Optimizers):
            raise InputError(
                "run.prepare was given a dict of schedulers and one optimizer. A run with one optimizer has one: chain several "
                "with torch.optim.lr_scheduler.ChainedScheduler or SequentialLR."
            )
        made = {}
        for name, one in named.items():
            if name not in optimizer.optimizers:
                raise UnknownNameError("optimizer of the scheduler", name, optimizer.optimizers)
            # One that has been made has a step(); a function of the optimizer has none.
            schedule: Any = one if hasattr(one, "step") else one(optimizer[name])
            if schedule is not None:
                made[name] = schedule
        return Schedules(made, optimizer)

    return cast(MakeScheduler, make)  # it steps as a schedule does


Rules: TypeAlias = Mapping[str, Rule]


def with_outside(
    options: RunOptions,
    entry: StrategyEntry,
    model: nn.Module,
    optimizer: Optimizer,
    rules: Rules,
    structure: Structure,
) -> tuple[nn.Module, Rules, Structure]:
    """Put parameters that the optimizer has and the model has not beside it; what it has is named behind `model.` then."""
    outside = [] if isinstance(optimizer, Optimizers) else parameters_outside(model, optimizer)
    if not outside:
        return model, rules, structure
    for asked, name in (
        (not entry.several or entry.sharded, f"--strategy {options.strategy}"),
        (options.compile, "--compile"),
        (options.tuning.offload, "--offload"),
    ):
        if asked:
            raise InputError(
                f"the optimizer holds a parameter of shape {tuple(outside[0].shape)} that the model has not, and {name} trains "
                "the model's own. Put it in the model (self.scale = nn.Parameter(...), read in forward), or use single, dp, ddp "
                "or ps without it."
            )
    blocks = structure.blocks and [f"{MODEL}.{name}" for name in structure.blocks]
    return (
        WithOutside(model, outside),
        {f"{MODEL}.{name}": rule for name, rule in rules.items()},
        replace(structure, blocks=blocks),
    )


def check_several(options: RunOptions, entry: StrategyEntry, *, with_optimizers: bool) -> None:
    """Raise where the strategy, or an option, cannot train several models, or with several optimizers in turn."""
    if not with_optimizers:
        raise InputError(
            "run.prepare was given several models and one optimizer. Give the models as one torch.nn.ModuleDict, or an "
            'optimizer for each: {"generator": opt_g, "discriminator": opt_d}.'
        )
    for asked, name in (
        (not entry.several, f"--strategy {options.strategy}"),
        (options.compile, "--compile"),
        (options.tuning.compress != "none", "--compress"),
        (bool(options.tuning.staleness), "--staleness"),
        (options.tuning.offload, "--offload"),
    ):
        if asked:
            raise InputError(
                f"{name} trains one model with one optimizer, and run.prepare was given several. Use single, dp, ddp, fsdp or ps "
                "without it, or put all parameters into groups of one optimizer."
            )

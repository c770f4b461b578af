"""Exact prediction: the outputs of every sample once, in the order of the samples, on any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data import ShardedLoader
from paceline.data.parts import in_order
from paceline.errors import InputError
from paceline.recovery.membership import EVALUATE
from paceline.strategies.in_turns.outside import own_model
from paceline.training.core import EngineCore
from paceline.training.evaluation import measured
from paceline.training.group import RunGroup
from paceline.training.measuring import evaluating
from paceline.training.prediction_file import check_path, prediction_file
from paceline.world import World, all_gather_object, fault_points

Function = Callable[[nn.Module, Any], Tensor | Mapping[str, Tensor]]
Outputs = dict[str, Tensor]
CALLED = "run.predict"
WINDOW = 8
"""Steps whose outputs are in one worker's memory together, where they go to a file."""
ALONE = ""
"""Stands for the name of an output that was returned as a tensor, not in a dict; no user's name is empty."""
ONE = "output"
"""What it is called in a file."""


@dataclass(kw_only=True)
class Predicting:
    """Predicts with all workers."""

    core: EngineCore
    group: RunGroup

    def predict(
        self, data: Any, function: Function, *, batch_size: int | None = None, out: Path | None = None
    ) -> Any:
        """Return the outputs of all samples on every worker, or write them to a file and return their number."""
        state, history = self.core.state, self.core.history
        state.check_between(CALLED)
        if state.waits_to_join or history.elsewhere or history.resumed:
            raise InputError(
                "run.predict was called where the function goes once more through what the run did before, and the weights of "
                "then are gone. Write `if not run.replaying:` before it."
            )
        if out is not None:
            check_path(out)
        with self.core.loaders.measured(in_order(data), batch_size) as loader:
            _check_order(loader)
            self.group.take_snapshot()

            def act() -> Any:
                with evaluating(self.core):
                    windows = self._windows(loader, self.core.loop.left.watched(state, function))
                    return _to_memory(windows) if out is None else _to_file(windows, state.world, out)

            return self.core.recovery.together(EVALUATE, act, called=CALLED)

    def _windows(self, loader: ShardedLoader, function: Function) -> Iterator[list[Outputs]]:
        """Yield the outputs of some steps at a time, batch by batch in the order of the samples, on all workers."""
        state = self.core.state
        one = _checked(function)
        for rows in measured(loader, one, state.replica, state.world, state.options.seed, WINDOW):
            everybody: list[Any] = all_gather_object(state.world.comm, rows)
            # Workers beside each other in a mesh compute the same batches.
            whole = {key: row for theirs in everybody for key, row in theirs.items()}
            if whole:
                yield [dict(whole[key]) for key in sorted(whole)]


def _check_order(loader: ShardedLoader) -> None:
    """Raise where rows would not be those of all samples, one after the other."""
    why = "a sampler, drop_last=True or order=" if loader.uneven else loader.disorder()
    if why is not None:
        raise InputError(
            "run.predict gives a row for each sample, in the order of the samples, and this loader has another order or leaves "
            f"samples out ({why}). Give the data set itself: run.predict(dataset, function, batch_size=N), or "
            "run.loader(dataset, batch_size=N, shuffle=False)."
        )


def _checked(function: Function) -> Callable[[nn.Module, Any], Outputs]:
    def predict(model: nn.Module, batch: Any) -> Outputs:
        made = function(own_model(model), batch)
        outputs = {ALONE: made} if isinstance(made, Tensor) else made
        if (
            not isinstance(outputs, Mapping)
            or not outputs
            or not all(isinstance(one, Tensor) for one in outputs.values())
        ):
            raise InputError(
                f"predict() must return a tensor or a dict of tensors; it returned {made!r:.80}."
            )
        size = _size_of(batch)
        for name, one in outputs.items():
            if not isinstance(name, str) or (not name and outputs is made):
                raise InputError(f"predict() returned a tensor called {name!r:.80}. Give it a name, a text.")
            if one.dim() == 0 or (size is not None and len(one) != size):
                raise InputError(
                    f"predict() returned {name or ONE} of the shape {tuple(one.shape)} for a batch of {size or 'some'} samples; "
                    "its first dimension must be the batch."
                )
        # Copies: a model may write its next outputs into the same memory.
        return {name: one.detach().to("cpu", copy=True) for name, one in outputs.items()}

    return predict


def _size_of(batch: Any) -> int | None:
    """Return how many samples a batch holds, where its tensors agree."""
    while isinstance(batch, Mapping | list | tuple) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch) if isinstance(batch, Tensor) and batch.dim() else None


def _joined(parts: list[Outputs]) -> Outputs:
    first = parts[0]
    for part in parts:
        for name, one in part.items():
            if name not in first or len(part) != len(first):
                raise InputError(
                    f"predict() returned {_said(part)} for one batch and {_said(first)} for another. Return the same "
                    "names for each."
                )
            if one.shape[1:] != first[name].shape[1:] or one.dtype != first[name].dtype:
                raise InputError(
                    f"predict() returned {name or ONE} as {one.dtype} of the shape {tuple(one.shape)} for one batch and as "
                    f"{first[name].dtype} of {tuple(first[name].shape)} for another. Pad what differs in length to one size."
                )
    return {name: torch.cat([part[name] for part in parts]) for name in first}


def _said(part: Outputs) -> str:
    return ", ".join(name or "a tensor" for name in part)


def _to_memory(windows: Iterator[list[Outputs]]) -> Tensor | Outputs:
    parts = [part for window in windows for part in window]
    if not parts:
        raise InputError("there is nothing to predict: the data gave no sample.")
    whole = _joined(parts)
    return whole.get(ALONE, whole)


def _to_file(windows: Iterator[list[Outputs]], world: World, path: Path) -> int:
    """Write on the first worker what all have made; no worker holds more than a few steps of it."""
    samples = 0
    like: Outputs | None = None
    with prediction_file(path) if world.is_first else nullcontext() as file:
        for parts in windows:
            whole = _joined(parts if like is None else [like, *parts])
            like = {name: one[:0].clone() for name, one in whole.items()}
            samples += len(next(iter(whole.values())))
            if file is not None:
                file.add({name or ONE: one for name, one in whole.items()})
        if not samples:
            raise InputError("there is nothing to predict: the data gave no sample.")
        fault_points.hit(fault_points.EVALUATION)
        if file is not None:
            file.commit()
        all_gather_object(world.comm, None)  # whoever gets further knows that the file is there
    return samples

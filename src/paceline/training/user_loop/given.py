"""What `run.prepare` is given, in any order of kinds: model, optimizer, schedule and data are told apart by their types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.data import ShardedLoader
from paceline.data.loaders import is_loader
from paceline.errors import InputError

MODEL, OPTIMIZER, SCHEDULER, DATA, NOTHING = "model", "optimizer", "scheduler", "data", "nothing"
_MADE = (MODEL, OPTIMIZER, SCHEDULER)
"""What functions make, in the order in which they are given."""


_SEVERAL = 'several models and optimizers under names: run.prepare({"one": model, "other": model}, {"one": optimizer, ...}).'
_REGISTER = 'run.register("name", scheduler) behind run.prepare.'


class Given:
    """The arguments of one call, by kind."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        kinds = [_kind(part) for part in parts]
        unsaid = iter(kind for kind in _MADE if kind not in kinds)
        self._kinds = [
            kind or (next(unsaid, None) if _makes(part) else None)
            for part, kind in zip(parts, kinds, strict=True)
        ]
        for part, kind in zip(parts, self._kinds, strict=True):
            if kind is None:
                raise InputError(
                    f"run.prepare was given a {type(part).__name__}, which is no model, optimizer, schedule or DataLoader. Give "
                    "one of each (functions that make model, optimizer and schedule in this order), several schedules as one "
                    f"ChainedScheduler or SequentialLR, {_SEVERAL}"
                )
        for kind in _MADE:
            if self._kinds.count(kind) > 1:
                others = f"one, and keep the others with {_REGISTER}" if kind == SCHEDULER else _SEVERAL
                raise InputError(f"run.prepare was given {self._kinds.count(kind)} {kind}s. Give {others}")
        for kind in (MODEL, OPTIMIZER):
            if kind not in self._kinds:
                raise InputError(f"run.prepare was given no {kind}. Give model and optimizer together.")

    def __getitem__(self, kind: str) -> Any:
        """Return the one part of a kind; None where there is none."""
        return next((part for part, one in zip(self._parts, self._kinds, strict=True) if one == kind), None)

    def returned(self, prepared: Mapping[str, Any], data: Iterator[Any]) -> tuple[Any, ...]:
        """Return what has become of each part, in the order in which they were given."""
        return tuple(
            next(data) if kind == DATA else prepared[kind] for kind in self._kinds if kind is not None
        )

    @property
    def data(self) -> list[Any]:
        """What is to be gone through."""
        return [part for part, kind in zip(self._parts, self._kinds, strict=True) if kind == DATA]


def _makes(part: Any) -> bool:
    """Return whether a part is a function that makes one, or functions under names."""
    if isinstance(part, Mapping):
        return bool(part) and all(map(callable, part.values()))
    return callable(part)


def _kind(part: Any) -> str | None:
    """Return what a part is; None where only its place says so, or nothing does."""
    one = next(iter(part.values()), None) if isinstance(part, Mapping) else part
    if part is None:
        return NOTHING
    if isinstance(one, nn.Module | Optimizer):
        return MODEL if isinstance(one, nn.Module) else OPTIMIZER
    if is_loader(part) or isinstance(part, ShardedLoader):
        return DATA
    steps = all(callable(getattr(one, name, None)) for name in ("step", "state_dict", "load_state_dict"))
    return SCHEDULER if steps and not isinstance(one, type) else None  # a class is called to make one

"""A Task of a transformers model, a data set and a collator; what is not given is asked of a subclass, as in any Task."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.declared import Collected, MetricState
from paceline.errors import InputError, UnknownNameError
from paceline.hf.library import transformers
from paceline.hf.losses import loss
from paceline.task import Loss, Mean, Task

MakeOptimizer = Callable[[nn.Module], Optimizer]
MakeSchedule = Callable[[Optimizer, int | None], LRScheduler | None]
Metrics = Callable[[nn.Module, Any], dict[str, Mean]]
_ATTRIBUTES = [
    name
    for name in inspect.get_annotations(Task)
    if not name.startswith("_") and name not in ("name", "collate")
]
"""What any Task may set beside its methods."""


class TransformersTask(Task):
    """Trains a model of transformers' on the mean loss over the labels that count.

    Give its parts to the constructor, or make a subclass with methods of a Task in their place.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        train: Any = None,
        evaluate: Any = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        lr: float = 5e-5,
        optimizer: MakeOptimizer | None = None,
        scheduler: MakeSchedule | None = None,
        metrics: Metrics | None = None,
        kind: str | None = None,
        **attributes: Any,
    ) -> None:
        """`model` is a model, a function that makes one, a configuration (of a causal language model) or a folder of weights.

        `train` and `evaluate` are data sets or functions that make them; `attributes` are a Task's: batch_size, epochs, ...
        """
        self.lr = lr
        self._model, self._train, self._evaluate = model, train, evaluate
        self._optimizer, self._scheduler, self._metrics, self._kind = optimizer, scheduler, metrics, kind
        if collate is not None:
            self.collate = collate
        for name, value in attributes.items():
            if name not in _ATTRIBUTES:
                raise UnknownNameError(f"argument of {type(self).__name__}", name, _ATTRIBUTES)
            setattr(self, name, value)

    def model(self) -> nn.Module:
        """Make the model: the same one every time."""
        given = self._model
        if isinstance(given, nn.Module):
            return copy.deepcopy(given)
        if isinstance(given, str | Path):
            from paceline.hf.weights import from_folder

            return from_folder(given)
        library = transformers()
        if isinstance(given, library.PreTrainedConfig):
            made: nn.Module = library.AutoModelForCausalLM.from_config(copy.deepcopy(given))
            return made
        if callable(given):
            given = given()
            if isinstance(given, nn.Module):
                return given
        raise _lacking("model", given)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make the optimizer that was given, or AdamW over what trains."""
        if self._optimizer is not None:
            return self._optimizer(model)
        return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=self.lr)

    def scheduler(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler | None:
        """Make the schedule that was given."""
        return None if self._scheduler is None else self._scheduler(optimizer, total_steps)

    def train_data(self) -> Any:
        """Return the training set."""
        if self._train is None:
            raise _lacking("train", None)
        return _made(self._train)

    def eval_data(self) -> Any | None:
        """Return the evaluation set, if there is one."""
        return _made(self._evaluate)

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Loss:
        """Compute the sum of the losses and what it is of."""
        return loss(model, batch, kind=self._kind)

    def metrics(
        self, model: nn.Module, batch: Mapping[str, Any]
    ) -> Mapping[str, Mean | Collected | MetricState]:
        """Measure what was given, or the loss."""
        return super().metrics(model, batch) if self._metrics is None else self._metrics(model, batch)


task = TransformersTask
"""`paceline.hf.task(model=..., train=..., collate=..., lr=...)` is a Task like any other."""


def _made(data: Any) -> Any:
    """Return a data set, made now where it is a function."""
    return data() if callable(data) and not hasattr(data, "__getitem__") else data


def _lacking(what: str, given: Any) -> InputError:
    """Return what is said of a part that is not what it must be."""
    return InputError(
        f"paceline.hf.task needs {what}=, and was given {'nothing' if given is None else 'a ' + type(given).__name__}. Give a "
        + (
            "model of transformers', a function that makes one, a configuration, or a folder with its weights."
            if what == "model"
            else "data set, or a function that makes one."
        )
    )

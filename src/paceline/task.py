"""The contract with the user's code: `Task`, `Loss` and `Mean`.

A `Task` says what is trained: model, optimizer, data, loss. It never says how many processes do it.
A `Loss` is a sum and a weight. paceline alone divides, once, by the weight of the whole global batch, so a
short last batch, a token-weighted loss and accumulation are right by construction on any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import get_worker_info

from paceline.declared import (
    Average,
    Best,
    CheckpointInfo,
    Collected,
    EarlyStopping,
    EpochInfo,
    EvalInfo,
    MetricState,
    StepInfo,
)
from paceline.errors import InputError

Weight = int | float | Tensor
ONE_WEIGHT = "it must be one number: how many items (or tokens) the sum is over"
_NO_NUMBERS = "cmMSU"
"""Kinds of numpy's types that `float` may take, and that are no numbers on a line: complex, times, texts."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric as a sum and its weight, so that the mean over any number of workers is exact."""

    total: Tensor | float
    weight: Weight


@dataclass(frozen=True, slots=True)
class Loss:
    """The sum of the losses of some items, and how many items (or tokens, or how much weight) that was.

    Auxiliary terms (a balance loss, say) have a weight of their own: each is divided by its own global
    weight before they are added.
    """

    total: Tensor
    weight: Weight
    auxiliary: dict[str, Loss] = field(default_factory=dict)

    @classmethod
    def mean(cls, per_item: Tensor, **auxiliary: Loss) -> Loss:
        """Return the mean over items: `per_item` holds one loss for each (use `reduction="none"`)."""
        if not isinstance(per_item, Tensor):
            raise InputError(
                f"Loss.mean was given a {type(per_item).__name__}, not a tensor. Give one tensor that holds one loss for each "
                "item: reduction='none', or torch.stack(losses)."
            )
        if per_item.dim() == 0:
            raise InputError(
                "Loss.mean was given one number, which is a mean already, so the answer would be a mean of means. Give one "
                "loss for each item (reduction='none'; a batch of one has the shape [1]), or Loss.from_mean(loss, weight)."
            )
        return cls(per_item.sum(), per_item.numel(), auxiliary)

    @classmethod
    def from_mean(cls, mean: Tensor, weight: Weight, **auxiliary: Loss) -> Loss:
        """Return the loss of a batch whose mean is known: `mean` times the number of items (or tokens) it was taken over.

        For models that give their loss as a mean, as many of Hugging Face's do; `weight` must be exactly what they divided by
        (for a causal language model the labels that are not -100, the first of each sequence left out). A batch in which
        nothing counts has the weight 0 and adds nothing, though its mean is nan.
        """
        if not isinstance(mean, Tensor):
            raise InputError(
                f"Loss.from_mean was given a {type(mean).__name__}, not a tensor, so it has no gradient. Leave out .item()."
            )
        if not torch.compiler.is_compiling() and (fault := fault_of(weight)):
            raise InputError(f"the weight given to Loss.from_mean {fault}; {ONE_WEIGHT}.")
        if mean.dim() != 0:
            raise InputError(
                f"Loss.from_mean was given a tensor of the shape {tuple(mean.shape)}, not a mean. Use Loss.mean(per_item)."
            )
        return cls(_left_out(mean, weight) * weight, weight, auxiliary)

    @classmethod
    def tokens(cls, logits: Tensor, targets: Tensor, *, ignore_index: int = -100, **auxiliary: Loss) -> Loss:
        """Return the mean cross-entropy over the tokens whose target is not `ignore_index`."""
        total = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            targets.reshape(-1),
            ignore_index=ignore_index,
            reduction="sum",
        )
        return cls(total, (targets != ignore_index).sum(), auxiliary)


class Task:
    """What is trained. Subclass it, give the five methods below `epochs`, and run it with any strategy.

    Arguments of `__init__` become options of the command line: `--set lr=3e-4`.
    """

    batch_size: int = 32
    """The GLOBAL batch: it does not change with the number of workers."""
    shards: int | None = None
    """Logical shards of a global batch: what the bits depend on, like the seed. None is one per worker, and then another
    number of workers gives other bits unless `--shards` says otherwise."""
    epochs: int = 1
    seed: int = 0
    max_grad_norm: float | None = None
    """Largest norm of the true global gradient; None leaves it alone."""
    micro_batch: int | None = None
    """Most samples in one forward pass; a larger share is accumulated without synchronising."""
    precision: str = "fp32"
    num_workers: int = 0
    """Processes that load data for each worker; 0 loads in the worker itself."""
    find_unused_parameters: bool = False
    """Whether some parameters may get no gradient in some steps (costs a walk over the graph)."""
    eval_every: int | str | None = None
    """When to evaluate: every so many steps (100) or epochs ("2epochs"); None is after every epoch, and at the end."""
    early_stopping: EarlyStopping | None = None
    """When to end before the last step, by a metric."""
    keep_best: Best | None = None
    """Which checkpoints to keep beside the newest, by a metric."""
    average: Average | None = None
    """A moving average of the weights to keep, and to evaluate."""
    name: ClassVar[str | None] = None

    collate: Callable[[Sequence[Any]], Any] | None = None
    """Turns a list of samples into a batch; None takes torch's default_collate."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called once in each loading process with its number."""

    _steps_done = 0

    @property
    def steps_done(self) -> int:
        """How many optimizer steps the run has taken: the same on every worker and after a resume.

        For a weight in the loss that grows over training; a counter of the task's own would count the passes of one worker.
        """
        if get_worker_info() is not None:
            raise InputError(
                "task.steps_done was read in a loading process, which reads ahead and does not know it. Use it in loss() or "
                "metrics(), or set num_workers = 0."
            )
        return self._steps_done

    @steps_done.setter
    def steps_done(self, steps: int) -> None:
        self._steps_done = steps

    def __deepcopy__(self, _: dict[int, Any]) -> Task:
        """Return the same task: what a module that holds it reads is true in a copy of the module too."""
        return self

    def model(self) -> nn.Module:
        """Make the model; paceline seeds torch beforehand."""
        raise NotImplementedError(f"{type(self).__name__} needs a method model(self)")

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make the optimizer over the model's parameters."""
        raise NotImplementedError(f"{type(self).__name__} needs a method optimizer(self, model)")

    def scheduler(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler | None:  # noqa: ARG002
        """Make a schedule; it steps once per optimizer step, whatever the number of workers."""
        return None

    def buffers(self) -> Mapping[str, Any]:
        """Return how buffers that shards make differ are combined: name or pattern -> "mean", "sum", "max", "min", "first".

        A function of (value before, values of the shards) does too. BatchNorm's are known already.
        """
        return {}

    def block_modules(self) -> Sequence[str] | None:
        """Name the modules that are gathered (fsdp) and recomputed as one, patterns allowed; None finds the repeated blocks."""
        return None

    def tensor_plan(self) -> Mapping[str, Any] | None:
        """Return how layers are split (tp): name or pattern -> "columns", "rows" or a ParallelStyle; None proposes a plan."""
        return None

    def pipeline_stages(self) -> Sequence[str] | None:
        """Name the modules at which the second and later stages begin (pp); None cuts where it balances."""
        return None

    def train_data(self) -> Any:
        """Return the training set: a map-style or an iterable dataset."""
        raise NotImplementedError(f"{type(self).__name__} needs a method train_data(self)")

    def order(self) -> Callable[[int, int], Any] | None:
        """Return the order of the training samples, a function of (seed, epoch); None shuffles them, or takes a DataLoader's.

        `paceline.data` has Weighted, Bucketed and Curriculum.
        """
        return None

    def eval_data(self) -> Any | None:
        """Return the evaluation set, or None for a run without evaluation."""
        return None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss of one batch as a sum and a weight."""
        raise NotImplementedError(f"{type(self).__name__} needs a method loss(self, model, batch)")

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Mean | Collected | MetricState]:
        """Measure one batch of the evaluation set; by default the loss alone."""
        loss = self.loss(model, batch)
        return {"loss": Mean(loss.total, loss.weight)}

    def predict_data(self) -> Any | None:
        """Return the data that `--predict` takes; the evaluation set, unless you say otherwise."""
        return self.eval_data()

    def predict(self, model: nn.Module, batch: Any) -> Tensor | Mapping[str, Tensor]:
        """Compute the outputs of one batch, one row for each sample; by default the model's, of a batch's first part."""
        return model(batch[0] if isinstance(batch, list | tuple) else batch)  # type: ignore[no-any-return]

    def state(self) -> Mapping[str, Any]:
        """Return what hooks change and the run is to keep: objects with `state_dict` and `load_state_dict`, or dicts, by name."""
        return {}

    def on_step(self, info: StepInfo) -> None:
        """Act on a step that was applied; on every worker, alike."""

    def on_epoch(self, info: EpochInfo) -> None:
        """Act at the end of an epoch, after its evaluation; on every worker, alike."""

    def on_eval(self, info: EvalInfo) -> None:
        """Act on an evaluation; on every worker, alike."""

    def on_checkpoint(self, info: CheckpointInfo) -> None:
        """Act on a checkpoint that is whole on disk; on the one worker that has committed it."""


def _left_out(mean: Tensor, weight: Weight) -> Tensor:
    """Return a mean, or 0 where it was taken over nothing: nan times 0 is nan, and so would be every gradient."""
    if isinstance(weight, Tensor) and (weight.device.type != "cpu" or torch.compiler.is_compiling()):
        # To ask a device would make it wait, and a question ends a graph.
        return mean.masked_fill((weight == 0).reshape(()), 0.0)
    if weight:
        return mean
    if mean.grad_fn is not None and mean.grad_fn.name() == "DivBackward0":
        raise InputError(
            "Loss.from_mean was given the weight 0 and a mean that was divided by it: the derivative of that division is no "
            "number either. Give the sum and its weight instead: Loss(total, weight)."
        )
    return mean.nan_to_num(0.0, 0.0, 0.0)


def fault_of(value: object) -> str:
    """Return why a value is not one real number, or nothing; of a tensor only the form is asked, without a wait."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        count = value.numel() if isinstance(value, Tensor) else value.size
        if count != 1:
            return f"has the shape {tuple(value.shape)}"
        none = value.is_complex() if isinstance(value, Tensor) else value.dtype.kind in _NO_NUMBERS
        return f"is of the type {value.dtype}" if none else ""
    if isinstance(value, str | bytes | bytearray):
        return f"is the text {value!r:.80}"
    try:
        float(value)  # type: ignore[arg-type]
    except OverflowError:
        return "is larger than any floating-point number"
    except (TypeError, ValueError):
        return f"is {value!r:.80}"
    return ""


def as_float(value: Weight) -> float:
    """Return a weight or a total as a Python number."""
    return float(value.item()) if isinstance(value, Tensor | np.ndarray) else float(value)

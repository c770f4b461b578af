"""Watches a script from inside its worker: DDP, optimizers, backward, clipping and loaders, wrapped before it starts.

Nothing here changes what the script computes, but for the enlarged batches where they are asked for. It is for a
process that runs this one script and ends: what is wrapped stays wrapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from paceline.compat.data_loader import watch_index_sampler
from paceline.compat.modules import BatchNorm, Dropout
from paceline.verify.proof import digests
from paceline.verify.proof.lab.experiments import STRETCH
from paceline.verify.script.script_trace import KEPT_STEPS, Pass, ScriptTrace, StepTrace, Wrapped
from paceline.world import seeds


class ScriptWatch:
    """Notes what the script does on one worker."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.trace = ScriptTrace(rank=rank)
        self._folder = folder
        self._names: dict[int, str] = {}
        self._loaders: dict[int, int] = {}
        self._losses: list[float] = []
        self._rows = 0
        self._clipped: list[dict[str, str]] = []
        self._hooked: set[int] = set()

    def install(self, scale: int = 1) -> None:
        """Wrap what is to be watched; `scale` enlarges the batches of every DataLoader."""
        if scale > 1:
            _around(DataLoader, "__init__", functools.partial(_enlarged, scale))
        _around(DistributedDataParallel, "__init__", self._wrapping)
        _around(DistributedDataParallel, "forward", self._forward)
        _around(torch.Tensor, "backward", self._backward)
        _around(torch.Tensor, "register_hook", self._hooking)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrapped = self._clipping(getattr(torch.nn.utils, name))
            setattr(torch.nn.utils, name, wrapped)
            setattr(torch.nn.utils.clip_grad, name, wrapped)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        watch_index_sampler(self._sampler)

    # The model.

    def _wrapping(
        self, original: Callable[..., None], ddp: Any, module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        seen = Wrapped(before=digests.of_named(module.state_dict().items()))
        original(ddp, module, *args, **kwargs)
        seen.after = digests.of_named(module.state_dict().items())
        for name, part in module.named_modules():
            if isinstance(part, Dropout) and part.p > 0:
                seen.dropout.append(name)
            if isinstance(part, BatchNorm) and not isinstance(part, nn.SyncBatchNorm):
                seen.batch_statistics.append(name)
        self._names |= {id(parameter): name for name, parameter in module.named_parameters()}
        self.trace.wrapped.append(seen)

    def _forward(self, original: Callable[..., Any], ddp: Any, *args: Any, **kwargs: Any) -> Any:
        first = next(
            (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.dim()), None
        )
        if first is not None and torch.is_grad_enabled():
            self._rows += len(first)
        return original(ddp, *args, **kwargs)

    # A step.

    def _backward(self, original: Callable[..., None], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        if tensor.numel() == 1:
            self._losses.append(float(tensor.detach()))
        original(tensor, *args, **kwargs)

    def _hooking(self, original: Callable[..., Any], tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        if not isinstance(tensor, nn.Parameter):
            return original(tensor, hook)

        @functools.wraps(hook)
        def watched(gradient: Tensor) -> Any:
            result = hook(gradient)
            if id(tensor) not in self._hooked:  # once: the user's hook may count its calls
                self._hooked.add(id(tensor))
                stretched = hook(gradient.clone() * STRETCH)
                if result is not None and not torch.allclose(stretched, result * STRETCH, rtol=1e-3):
                    self.trace.bent_hooks.append(self._name(tensor, len(self._hooked)))
            return result

        return original(tensor, watched)

    def _clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self._clipped.append(digests.of_named(self._gradients(held).items()))
            return original(held, *args, **kwargs)

        return watched

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        held = self._gradients(_parameters(optimizer))
        step = StepTrace(
            rates=tuple(float(group["lr"]) for group in optimizer.param_groups),
            losses=self._losses,
            gradients=digests.of_named(held.items()),
            rows=self._rows,
            clipped=self._clipped,
        )
        self._losses, self._clipped, self._rows = [], [], 0
        self.trace.steps.append(step)
        if self.trace.passes:
            self.trace.passes[-1].steps += 1
        self._keep("gradient", held)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        weights = {self._name(one, place): one.detach() for place, one in enumerate(_parameters(optimizer))}
        self._keep("weight", weights)

    def _keep(self, kind: str, tensors: dict[str, Tensor]) -> None:
        number = len(self.trace.steps) - 1
        if self.trace.rank == 0 and number < KEPT_STEPS:
            torch.save(tensors, kept(self._folder, kind, number))

    def _gradients(self, parameters: list[Tensor]) -> dict[str, Tensor]:
        return {
            self._name(one, place): one.grad.detach().clone()
            for place, one in enumerate(parameters)
            if one.grad is not None
        }

    def _name(self, parameter: Tensor, place: int) -> str:
        return self._names.get(id(parameter), f"parameter {place}")

    # The data.

    def _sampler(self, loader: DataLoader[Any], sampler: Any) -> Any:
        if isinstance(loader.dataset, torch.utils.data.IterableDataset):
            return sampler
        return _WatchedSampler(self, loader, sampler)

    def begin(self, loader: DataLoader[Any]) -> Pass:
        """Begin to note one pass over a loader."""
        inner = loader.sampler
        whole, _ = _rooted(loader.dataset, 0)
        made = Pass(
            loader=self._loaders.setdefault(id(loader), len(self._loaders)),
            sampler=type(inner).__name__,
            samples=len(whole),
            shuffles=bool(getattr(inner, "shuffle", type(inner).__name__ == "RandomSampler")),
            data=_first_item(whole),
            part=_part(loader.dataset),
            served=len(cast("Sized", loader.dataset)),
            replicas=_padding_replicas(inner),
        )
        self.trace.passes.append(made)
        return made


class _WatchedSampler:
    """Notes the ids that a loader is about to read; a pass begins with the first."""

    def __init__(self, watch: ScriptWatch, loader: DataLoader[Any], sampler: Any) -> None:
        self._watch, self._loader, self._sampler = watch, loader, sampler

    def __iter__(self) -> Iterator[Any]:
        noted = self._watch.begin(self._loader)
        for batch in self._sampler:
            ids = batch if isinstance(batch, (list, tuple)) else [batch]
            noted.batches.append([_rooted(self._loader.dataset, int(index))[1] for index in ids])
            yield batch

    def __len__(self) -> int:
        return len(self._sampler)


def _rooted(dataset: Any, index: int) -> tuple[Any, int]:
    """Return the data set behind a Subset, and the id that a sample has there."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    return dataset, index


def _part(dataset: Any) -> str:
    """Digest which samples a Subset is made of; empty for a data set that is no Subset."""
    if not isinstance(dataset, Subset):
        return ""
    return digests.of_batch([_rooted(dataset, place)[1] for place in range(len(dataset))])


def _padding_replicas(sampler: Any) -> int:
    pads = isinstance(sampler, DistributedSampler) and not sampler.drop_last
    return int(sampler.num_replicas) if pads else 0


def _first_item(dataset: Any) -> str:
    with seeds.preserved():
        try:
            return digests.of_batch(dataset[0])
        except Exception:  # noqa: BLE001  (a data set without an item 0: then nothing is said about shared samples)
            return ""


def kept(folder: Path, kind: str, step: int) -> Path:
    """Return the file in which the tensors of a step are kept."""
    return folder / f"{kind}-{step}.pt"


def _enlarged(
    scale: int, original: Callable[..., None], loader: Any, dataset: Any, *args: Any, **kwargs: Any
) -> None:
    """Make a loader whose batches are so many times as large."""
    if args and args[0] is not None:
        args = (args[0] * scale, *args[1:])
    elif kwargs.get("batch_size") is not None:
        kwargs = {**kwargs, "batch_size": kwargs["batch_size"] * scale}
    original(loader, dataset, *args, **kwargs)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _around(owner: Any, name: str, watcher: Callable[..., Any]) -> None:
    """Put a watcher around a method; it is given the original first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return watcher(original, *args, **kwargs)

    setattr(owner, name, call)

"""Proves a plan on the first batch: what split layers make together must be what the whole ones make.

A plan says nothing of what happens between its layers. A softmax over features of which each worker has a part, a random
mask drawn for the part alone, a parameter used there: all would go unnoticed, and the answer would be another one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from paceline.compat.dispatch import no_modes
from paceline.errors import InputError
from paceline.reduce.packing import as_real
from paceline.state.chunks import MODEL, ChunkBounds, Read
from paceline.world import World, seeds

SAME = 1e-6
"""How far apart the losses of workers may be that computed the same, of their size."""
CLOSE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
"""Relative differences that rounding stays far below (1e-6 in float32, 1e-2 in bf16) and mistakes do not."""


def proofs_of(model: nn.Module, regions: Sequence[str], precision: str) -> list[Proof]:
    """Keep one module of each kind among `regions` as it is before it is split."""
    kinds: dict[str, str] = {}
    for name in regions:
        kinds.setdefault(repr(model.get_submodule(name)), name)
    return [Proof(name, model.get_submodule(name), CLOSE[precision]) for name in kinds.values()]


class Proof:
    """Runs a copy of a module, made before it was split, beside it once, and compares."""

    def __init__(self, name: str, module: nn.Module, limit: float) -> None:
        self._name, self._limit = name, limit
        self._whole: nn.Module | None = copy.deepcopy(module)
        self._before: Tensor | None = None
        self._hooks: list[RemovableHandle] = []

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights of the whole module by their keys in a state, as long as the proof is to come."""
        if self._whole is None:
            return {}
        before = f"{MODEL}/{self._name}." if self._name else f"{MODEL}/"
        return {before + name: value for name, value in self._whole.state_dict().items()}

    def load(self, read: Read) -> None:
        """Load weights that the split module has loaded."""
        for key, value in self.tensors.items():
            value.copy_(read(key, ChunkBounds.whole(value.shape)))

    def watch(self, model: nn.Module) -> None:
        """Wait for the first training pass of the module, now split."""
        module = model.get_submodule(self._name)
        self._hooks = [
            module.register_forward_pre_hook(self._note),
            module.register_forward_hook(self._compare, with_kwargs=True),
        ]

    def _note(self, module: nn.Module, _: Any) -> None:
        self._before = _generator(module).get_state() if module.training else None

    def _compare(self, module: nn.Module, inputs: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._before is None or self._whole is None:
            return
        whole, self._whole = self._whole, None
        for hook in self._hooks:
            hook.remove()
        # Under the eyes of selective recomputation this pass would count as work of the block around it.
        with torch.no_grad(), seeds.preserved(), no_modes():
            _generator(module).set_state(self._before)
            wanted = whole.train()(*inputs, **kwargs)
        for one, other in zip(_tensors(output), _tensors(wanted), strict=False):
            apart = float((one.detach() - other).norm() / other.norm().clamp(min=1e-12))
            if not apart <= self._limit:
                raise InputError(
                    f"{self._name or 'the model'} makes something else split than whole, {apart:.1e} apart: what stands between "
                    "its split layers needs all features (softmax, a norm), or draws random numbers otherwise than by "
                    "nn.Dropout. Leave its layers out of the task's tensor_plan()."
                )


def check_same_totals(world: World, totals: Sequence[Tensor]) -> None:
    """Refuse a loss that comes out differently on workers that computed the same samples."""
    mine = torch.stack([one.detach().double().reshape(()) for one in totals])
    everybody = torch.stack(world.comm.all_gather(mine.to(world.device)))
    low, high = everybody.amin(0), everybody.amax(0)
    # What is computed alike comes out alike to the bit; a few roundings are left for kernels that differ.
    if bool((high - low > SAME * everybody.abs().amax(0)).any()):
        raise InputError(
            "the loss comes out differently on workers that computed the same samples: it uses weights or features of a split "
            "layer, of which each worker has a part. Leave that layer out of the task's tensor_plan(), or use --strategy ddp."
        )


def check_same_gradients(world: World, gradients: Mapping[str, Tensor | None]) -> None:
    """Raise for parameters that every worker holds whole but whose gradient is only a part."""
    nothing = torch.zeros((), dtype=torch.float32, device=world.device)
    norms = torch.stack(
        [nothing if one is None else as_real(one).float().norm() for one in gradients.values()]
    )
    all_norms = torch.stack(world.comm.all_gather(norms))
    low, high = all_norms.amin(0), all_norms.amax(0)
    wrong = (high - low > CLOSE["bf16"] * high).nonzero().flatten().tolist()
    if wrong:
        raise InputError(
            f"{list(gradients)[wrong[0]]} gets another gradient on each worker: it is used between split layers, where "
            "each sees a part. Leave the layers around it out of the task's tensor_plan()."
        )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [one for each in value for one in _tensors(each)] if isinstance(value, list | tuple) else []


def _generator(module: nn.Module) -> torch.Generator:
    device = next(module.parameters()).device
    return (
        torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    )

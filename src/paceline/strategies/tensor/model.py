"""Makes of a whole model the part of it that one worker computes: smaller layers, plain tensors, messages in between.

torch's `parallelize_module` splits the layers. What it leaves are DTensors, of which most of torch's own engines and all
optimizers would have to know; so each layer holds its part as a plain parameter, and makes a DTensor of it when it is
called. To everything around it (DDP, fully_shard, an optimizer) the result is a model like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import Optimizer

from paceline.compat.dispatch import is_transformed
from paceline.compat.modules import buffers_of, parameters_of
from paceline.compat.pytree import tree_leaves
from paceline.errors import InputError
from paceline.state.chunks import (
    MODEL,
    OPTIMIZER,
    Catalogue,
    ChunkBounds,
    LocalState,
    Read,
    TensorChunk,
    TensorMeta,
)
from paceline.strategies.guards.refusals import refuse_copies
from paceline.strategies.guards.second_order import check_transforms, watch_order
from paceline.strategies.sharded import bounds_of, with_part
from paceline.strategies.tensor.plan import TensorPlan, check_divided, check_tied
from paceline.strategies.tensor.proposal import join


@dataclass(frozen=True)
class Cut:
    """Which part of a whole parameter this worker has."""

    bounds: ChunkBounds
    whole: tuple[int, ...]

    @property
    def is_split(self) -> bool:
        """Whether others have other parts of it."""
        return self.bounds.shape != self.whole

    def place(self, inner: ChunkBounds) -> ChunkBounds:
        """Return where a part of this worker's part lies in the whole."""
        offset = tuple(a + b for a, b in zip(self.bounds.offset, inner.offset, strict=True))
        return ChunkBounds(offset, inner.shape)


Cuts = Mapping[str, Cut]


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: TensorPlan, guard: ReadGuard
) -> dict[str, Cut]:
    """Split a model's layers in place, as a plan says, and name their cuts; every worker must hold the same weights.

    `guard` refuses, once it is armed, to whoever reads a split weight outside of its layer.
    """
    before = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    parallelize_module(model, mesh, plan.styles, src_data_rank=None)
    check_tied(model, before)
    check_divided(model, mesh.size())
    split = {
        path: held
        for path, module in model.named_modules()
        if (
            held := {
                name: value
                for name, value in module.named_parameters(recurse=False)
                if isinstance(value, DTensor)
            }
        )
    }
    # A state has a module with two parents under both names.
    cuts = {
        name: Cut(bounds_of(value), tuple(value.shape))
        for name, value in model.named_parameters(remove_duplicate=False)
        if isinstance(value, DTensor)
    }
    for path, held in split.items():
        notes = {name: vars(before[join(path, name)]) for name in held}
        module = model.get_submodule(path)
        for name, _ in module.named_buffers(recurse=False):
            buffers_of(module)[name] = buffers[join(path, name)]
        _hold_parts(path, module, held, notes, guard)
    for name, attribute in plan.heads:
        counted = model.get_submodule(name)
        setattr(counted, attribute, getattr(counted, attribute) // mesh.size())
    return cuts


class _Away:
    """Stands where a split layer's weight is looked for outside of its forward pass: a part of it is no answer."""

    def __init__(self, name: str, part: nn.Parameter) -> None:
        self._name = name
        self.dtype, self.device, self.is_cuda = part.dtype, part.device, part.is_cuda
        self.requires_grad = part.requires_grad

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # what Python asks every object for
            raise AttributeError(attribute)
        self.refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        del function, types
        next(one for one in tree_leaves((args, kwargs)) if isinstance(one, cls)).refuse()

    def refuse(self, *_: object) -> NoReturn:
        """Raise by name."""
        raise InputError(
            f"{self._name} is read outside of its layer's forward pass, but under tp each worker holds a part of it. Leave the "
            "layer out of the task's tensor_plan(), or use --strategy ddp."
        )


for _operator in ("add", "sub", "mul", "truediv", "pow", "matmul"):  # which Python looks up past __getattr__
    setattr(_Away, f"__{_operator}__", _Away.refuse)
    setattr(_Away, f"__r{_operator}__", _Away.refuse)
for _operator in ("neg", "abs", "getitem", "setitem", "len", "iter", "float"):
    setattr(_Away, f"__{_operator}__", _Away.refuse)


class ReadGuard:
    """Hides split weights outside of their layers, from when the optimizer has been given them."""

    def __init__(self) -> None:
        self._hidden: list[tuple[nn.Module, dict[str, _Away]]] = []
        self._armed = False

    def watch(self, path: str, module: nn.Module, names: Iterable[str]) -> dict[str, _Away]:
        """Take note of the split weights of a layer; return what hides them."""
        parts = dict(module.named_parameters(recurse=False))
        away = {name: _Away(join(path, name), parts[name]) for name in names}
        self._hidden.append((module, away))
        return away

    def arm(self) -> None:
        """Begin: what is in `vars` hides the parameters of the same names."""
        self._armed = True
        for module, away in self._hidden:
            vars(module).update(away)

    def hide(self, module: nn.Module, away: Mapping[str, _Away]) -> None:
        """Hide the weights of a layer again that has computed."""
        if self._armed:
            vars(module).update(away)

    def check_given(self, name: str, given: Tensor | None, part: nn.Parameter) -> None:
        """Raise where a layer computes with a tensor that is neither its part of a weight nor detached from it."""
        # Where fsdp gathers parts they are other objects, and it refuses what is put in their place.
        own = given is part if self._armed else isinstance(given, nn.Parameter)
        if own or (given is not None and not is_transformed(given) and _same_memory(given, part)):
            return
        raise InputError(
            f"{name} was given another tensor for a call (torch.func.functional_call, a hook, an assignment), but under tp each "
            "worker holds a part of it, and what was made of a part alone may be something else. Leave the layer out of the "
            "task's tensor_plan(), or use --strategy ddp."
        )


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _hold_parts(
    path: str,
    module: nn.Module,
    held: Mapping[str, DTensor],
    notes: Mapping[str, dict[str, Any]],
    guard: ReadGuard,
) -> None:
    """Make a layer hold plain parameters and buffers, and DTensors of them while it computes."""
    layouts = {name: (value.device_mesh, value.placements) for name, value in held.items()}
    for name, value in held.items():
        part = nn.Parameter(value.to_local().detach().clone(), requires_grad=value.requires_grad)
        vars(part).update(notes[name])
        module.register_parameter(name, part)
    away = guard.watch(path, module, held)
    own = {name: module.get_parameter(name) for name in held}
    compute = module.forward
    where = next(iter(layouts.values()))[0]
    whole = [Replicate()] * where.ndim

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen, parts = vars(module), parameters_of(module)
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            seen[name] = DTensor.from_local(buffer, where, whole, run_check=False)
        for name, (mesh, placements) in layouts.items():
            guard.check_given(join(path, name), parts.get(name), own[name])
            seen[name] = DTensor.from_local(parts[name], mesh, placements, run_check=False)  # type: ignore[arg-type]
        try:
            made = compute(*map(_contiguous, args), **kwargs)
            watch_order(made, "tp")
            return made
        finally:
            for name in (*layouts, *buffers):
                seen.pop(name, None)
            _keep_plain(buffers_of(module), buffers)
            guard.hide(module, away)

    module.forward = forward
    module.register_forward_pre_hook(lambda *_: check_transforms("tp"), prepend=True)
    refuse_copies(module, "tp")


def _keep_plain(held: dict[str, Tensor | None], before: Mapping[str, Tensor]) -> None:
    """Make buffers plain again that a layer has assigned while it computed, as `self.count += 1` does."""
    for name, value in held.items():
        if isinstance(value, DTensor):
            plain, old = value.to_local().detach(), before.get(name)
            held[name] = old if old is not None and _same_memory(plain, old) else plain


def _contiguous(value: Any) -> Any:
    """Return a DTensor whose part here has no gaps, as a gather of uneven parts leaves them: torch 2.11 cannot flatten those."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        if value.to_local().is_contiguous():
            return value
    return with_part(value, value.to_local().contiguous())


def adopt(optimizer: Optimizer, model: nn.Module, before: Mapping[str, nn.Parameter], cuts: Cuts) -> None:
    """Make an optimizer that was made over the whole model update this worker's parts."""
    after = dict(model.named_parameters())
    parts = {id(value): name for name, value in before.items()}
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            name = parts.get(id(parameter), "")
            if name in cuts:
                group["params"][place] = part = after[name]
                if parameter in optimizer.state:
                    optimizer.state[part] = {
                        slot: cuts[name].bounds.of(value).clone()
                        if isinstance(value, Tensor) and tuple(value.shape) == cuts[name].whole
                        else value
                        for slot, value in optimizer.state.pop(parameter).items()
                    }


# State: a worker's part of a model is a part of each tensor of the whole one.


def chunks_of_whole(held: LocalState, cuts: Cuts) -> LocalState:
    """Return for chunks of this worker's model which chunks of the whole model they are."""
    chunks = {}
    for key, chunk in held.chunks.items():
        cut = cuts.get(_name(key))
        if cut is None or chunk.meta.shape != cut.bounds.shape:
            chunks[key] = chunk
        else:
            chunks[key] = TensorChunk(
                chunk.values, cut.place(chunk.bounds), TensorMeta(cut.whole, chunk.meta.dtype)
            )
    return replace(held, chunks=chunks)


def part_of_whole(catalogue: Catalogue, read: Read, cuts: Cuts) -> tuple[Catalogue, Read]:
    """Return a state of the whole model as one of this worker's."""
    mine: dict[str, TensorMeta] = {}
    moved: dict[str, Cut] = {}
    for key, meta in catalogue.items():
        cut = cuts.get(_name(key))
        if cut is None or meta.shape != cut.whole:
            mine[key] = meta
        else:
            mine[key], moved[key] = TensorMeta(cut.bounds.shape, meta.dtype), cut
    return mine, lambda key, bounds: read(key, moved[key].place(bounds) if key in moved else bounds)


def _name(key: str) -> str:
    kind, _, path = key.partition("/")
    return path if kind == MODEL else path.rpartition("/")[0] if kind == OPTIMIZER else ""


def norm_of_parts(gradients: Mapping[str, Tensor], split: Collection[str], device: torch.device) -> Tensor:
    """Return two sums of squares: over what is `split` among workers, and over what each has whole."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # the square of a norm may leave 32 bits
    for place, among in enumerate((True, False)):
        chosen = [gradient for name, gradient in gradients.items() if (name in split) == among]
        if chosen:
            sums[place] = torch.nn.utils.get_total_norm(chosen).double().square()
    return sums

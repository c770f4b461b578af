"""Tensors of the model that are not on this worker: what one is can be read, and any use of its values is refused in one line.

The very parameters are changed, so that whoever kept one from before the cut (a list for an average, a closure of the loss) is
told as well, in place of computing with weights of the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.compat.tensors import BOOKKEEPING, no_torch_function
from paceline.errors import InputError
from paceline.strategies.memory.offload import without_memory

_TENSOR: Any = Tensor
_PROPERTIES = (
    "shape dtype device layout ndim itemsize nbytes requires_grad is_leaf grad_fn is_cpu is_cuda is_xpu is_mps is_meta is_sparse "
    "is_nested is_quantized"
)
_METHODS = (
    "size dim ndimension numel nelement element_size get_device is_floating_point is_complex is_signed is_inference "
    "requires_grad_ __len__ __hash__"
)
_FUNCTIONS = "numel is_floating_point is_complex is_inference"
_READABLE = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in (*_PROPERTIES.split(), *BOOKKEEPING)),
        *(getattr(Tensor, name) for name in _METHODS.split()),
        *(getattr(torch, name) for name in _FUNCTIONS.split()),
        _TENSOR.requires_grad.__set__,
    )
)
_WRITES = (
    "copy_ fill_ zero_ add_ sub_ mul_ div_ clamp_ clamp_min_ clamp_max_ clip_ lerp_ nan_to_num_ __iadd__ __isub__ __imul__ "
    "__itruediv__"
)
_WRITING = frozenset(getattr(Tensor, name) for name in _WRITES.split())
"""Writes that the worker which has the tensor does as well: each is of one tensor, and draws nothing."""
_ALIASES = frozenset((Tensor.detach, _TENSOR.data.__get__))
_KEY, _FORM, _CLASS = "_absent", "_absent_form", "_absent_class"
_REFUSAL = (
    "{name} of the model is used, which is not on this worker: from the first step on pp leaves each worker the weights of its "
    "own stages, so the model cannot be called, copied or averaged, and state_dict() or a norm over parameters() would be of a "
    "part. Save with run.save() (paceline export makes one file of it), measure with run.evaluate, or use --strategy ddp."
)
_One = TypeVar("_One", bound=Tensor)


def _answer(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what does not depend on values; raise for all else."""
    one = args[0] if args else None
    name, is_elsewhere = getattr(one, "__dict__", {}).get(_KEY, ("", False))
    if func in _READABLE:
        with no_torch_function():
            return func(*args, **kwargs)
    if name and func == _TENSOR.grad.__get__:
        return _buffer(f"{name}.grad", one, is_elsewhere=False)
    if name and func == _TENSOR.grad.__set__ and args[1] is None:
        return None  # as model.zero_grad() does
    if is_elsewhere and func in _ALIASES:
        return _buffer(name, one, is_elsewhere=True)
    if is_elsewhere and func in _WRITING and not [*_named((args[1:], kwargs))]:
        return one
    if is_elsewhere and func == _TENSOR.data.__set__ and [*_named(args[1])] == [name]:
        return None  # p.data *= 0.9
    raise InputError(_REFUSAL.format(name=next(iter(_named((args, kwargs))), "a tensor of the model")))


class _AbsentParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return _answer(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{vars(self)[_KEY][0]}, not on this worker>"


class _AbsentTensor(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return _answer(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{vars(self)[_KEY][0]}, not on this worker>"


def is_absent(one: object) -> bool:
    """Return whether the values of a tensor are not on this worker."""
    return isinstance(one, _AbsentParameter | _AbsentTensor)


def form_of(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form on the meta device, of an absent one as well."""
    meta: Tensor | None = vars(tensor).get(_FORM) if is_absent(tensor) else None
    if meta is not None:
        return meta
    with no_torch_function():  # one that is in rows has a form of its own
        return torch.empty_like(tensor, device="meta")


def present(named: Iterable[tuple[str, _One]]) -> Iterator[tuple[str, _One]]:
    """Yield the tensors whose values are on this worker."""
    return ((name, one) for name, one in named if not is_absent(one))


def drop(model: nn.Module, kept: frozenset[str], device: torch.device) -> None:
    """Release all tensors of a model but the named ones; they seem to be on the device on which the others are."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            if full not in kept and not is_absent(parameter):
                parameter.grad, meta = None, form_of(parameter.detach())
                parameter.data = without_memory(parameter.shape, parameter.dtype, device)
                vars(parameter)[_FORM] = meta
                hide(parameter, full, is_elsewhere=True)
        for name, buffer in module.named_buffers(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            # Another object: a tensor that was registered as a buffer may be used elsewhere too, as it is.
            if full not in kept and not is_absent(buffer):
                made = _buffer(full, buffer, device, is_elsewhere=True)
                vars(made)[_FORM] = form_of(buffer)
                setattr(module, name, made)


class StageParameters:
    """The parameters of one worker's stages, those included that are in rows just now."""

    def __init__(self, model: nn.Module, names: frozenset[str]) -> None:
        self._model, self._names = model, names

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield them in the model's order."""
        named = self._model.named_parameters()
        return ((name, parameter) for name, parameter in named if name in self._names)


def hide(parameter: nn.Parameter, name: str, *, is_elsewhere: bool) -> None:
    """Make every use of a parameter raise; with `is_elsewhere` another worker has it, else each has some rows."""
    vars(parameter)[_KEY] = name, is_elsewhere
    vars(parameter)[_CLASS] = parameter.__class__
    parameter.__class__ = _AbsentParameter


def show(parameter: nn.Parameter) -> None:
    """Make a hidden parameter usable again."""
    if is_absent(parameter):
        parameter.__class__ = vars(parameter).pop(_CLASS)
        del vars(parameter)[_KEY]


def _buffer(name: str, like: Any, device: torch.device | None = None, *, is_elsewhere: bool) -> Tensor:
    made = without_memory(like.shape, like.dtype, device or like.device).as_subclass(_AbsentTensor)
    vars(made)[_KEY] = name, is_elsewhere
    return made


def _named(nest: Any) -> Iterator[str]:
    """Yield the names of the absent tensors in what a function was given."""
    if is_absent(nest):
        yield vars(nest)[_KEY][0]
    elif isinstance(nest, list | tuple):
        for one in nest:
            yield from _named(one)
    elif isinstance(nest, dict):
        yield from _named(list(nest.values()))

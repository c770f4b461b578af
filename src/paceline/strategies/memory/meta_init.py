"""Makes a model that nobody can hold: construction is written down first and carried out one tensor at a time.

The constructor runs on tensors without memory (torch's FakeTensor), and every operation on them is recorded. Then the
operations are carried out in the same order on real memory. A tensor has memory from the first write that counts to its
last use; earlier values that a later write replaces are still drawn, so the random generator runs as in a plain
construction, and the weights are the same to the bit. What cannot be recorded (a constructor that looks at values, or
seeds on its own) is made plainly, and the reason is given.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.compat.dispatch import TorchDispatchMode, arguments_of, name_of, no_modes
from paceline.compat.fake_tensors import FakeTensor, FakeTensorMode
from paceline.compat.modules import buffers_of, parameters_of, replaced_trunc_normal, trunc_normal_
from paceline.compat.pytree import tree_leaves, tree_map
from paceline.compat.tensors import hooks_of, post_accumulate_hooks_of, storage_key, write_count
from paceline.strategies.guards.overlaps import overlap_in
from paceline.strategies.guards.refusals import plain_tensors

Give = Callable[[str, Tensor], object]

_OVERWRITING = {
    f"aten::{name}_"
    for name in (
        *("uniform", "normal", "random", "exponential", "bernoulli", "log_normal", "cauchy", "geometric"),
        *("fill", "zero", "copy"),
    )
}
"""Writes that do not look at what was there before."""
_EMPTY = {
    f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
}


class NotRecordableError(Exception):
    """A construction that cannot be carried out later."""


class _View(NamedTuple):
    """A tensor as a window on some storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Constant(NamedTuple):
    """A real tensor that an operation reads, and how often it had been written to."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _Operation:
    function: Any
    arguments: Any
    results: tuple[_View | None, ...]
    touched: tuple[int, ...]
    """Storages it reads or writes."""
    begun: frozenset[int]
    """Those among them whose earlier values it does not need."""


class _Recording(TorchDispatchMode):
    """Writes down what is done to tensors that have no memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.storages: dict[int, torch.UntypedStorage] = {}
        """Held, so that no two have the same address."""
        self.generators: dict[torch.Generator, bytes] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation on the meta device, and record what it takes to repeat it."""
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            raise NotRecordableError(f"its constructor makes tensors on {device}")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._check_generator(kwargs.get("generator") or torch.default_generator)
        before = {
            self.view(leaf).storage for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)
        }
        written = _written(func, args, kwargs)
        if any(not isinstance(tensor, FakeTensor) for tensor in written):
            raise NotRecordableError("its constructor writes into a tensor that was made elsewhere")
        arguments = tree_map(self._kept, (args, kwargs))
        result = func(*args, **kwargs)
        made = [leaf if isinstance(leaf, FakeTensor) else None for leaf in tree_leaves(result)]
        results = tuple(None if one is None else self.view(one) for one in made)
        fresh = {view.storage for view in results if view is not None} - before
        if name_of(func) not in _EMPTY and (written or fresh):
            begun = fresh | {
                self.view(tensor).storage
                for tensor in written
                if name_of(func) in _OVERWRITING and self._covers(tensor, args[1:])
            }
            self.operations.append(
                _Operation(func, arguments, results, tuple(before | fresh), frozenset(begun))
            )
        return result

    def trunc_normal_(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Write torch's own truncated normal down as one operation: it draws again until it has seen that all is well."""
        if not isinstance(tensor, FakeTensor):
            raise NotRecordableError("its constructor writes into a tensor that was made elsewhere")
        self._check_generator(kwargs.get("generator") or torch.default_generator)
        view = self.view(tensor)
        begun = frozenset({view.storage} if self._covers(tensor, ()) else ())
        self.operations.append(
            _Operation(trunc_normal_, ((view, *args), kwargs), (None,), (view.storage,), begun)
        )
        return tensor

    def check_end(self) -> None:
        """Refuse a construction that moved a generator behind our back."""
        for generator in list(self.generators):
            self._check_generator(generator)

    def _check_generator(self, generator: torch.Generator) -> None:
        # Nothing is drawn while recording: a generator that stands elsewhere was seeded in between.
        with no_modes():
            state = generator.get_state().numpy().tobytes()
        if self.generators.setdefault(generator, state) != state:
            raise NotRecordableError("its constructor seeds a random generator between draws")

    def view(self, tensor: Tensor) -> _View:
        """Return a tensor as a window on its storage, which is held from now on."""
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage_key(storage), storage)
        return _View(
            storage_key(storage),
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def _kept(self, leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            return self.view(leaf)
        return _Constant(leaf, write_count(leaf)) if isinstance(leaf, Tensor) else leaf

    def _covers(self, tensor: Tensor, others: tuple[Any, ...]) -> bool:
        """Return whether a write to this tensor leaves nothing of what its storage held."""
        storage = tensor.untyped_storage()
        whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == storage.nbytes()
        read = {
            storage_key(leaf.untyped_storage())
            for leaf in tree_leaves(others)
            if isinstance(leaf, FakeTensor)
        }
        return whole and storage_key(storage) not in read


class RecordedInit:
    """A model without memory, and the way to its values."""

    def __init__(self, model: nn.Module, recording: _Recording) -> None:
        self.model = model
        """Its parameters and buffers are on the meta device."""
        self._recording = recording
        self._roots: dict[int, list[tuple[str, _View]]] = defaultdict(list)
        self._real: dict[str, Tensor] = {}
        _check_attributes(model)
        _check_hooks(model)
        for name, tensor in _tensors(model):
            if isinstance(tensor, FakeTensor):
                view = recording.view(tensor)
                self._roots[view.storage].append((name, view))
            else:
                self._real[name] = tensor.detach()
        self.overlap = overlap_in(model)
        """What to say of tensors that lie in each other's memory; on the meta device each has its own."""
        _put_on_meta(model)

    @torch.no_grad()
    def fill(self, give: Give) -> int:
        """Carry the construction out, hand over every tensor as soon as it is done, and give the most bytes held at once."""
        recording, memory = self._recording, _Memory(self._recording)
        for generator, state in recording.generators.items():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        for name, tensor in self._real.items():
            give(name, tensor)
        ends = _ends(recording.operations)
        for number, operation in enumerate(recording.operations):
            memory.carry_out(operation)
            for storage, is_last in ends.get(number, ()):
                if is_last:
                    self._hand_over(storage, memory, give)
                memory.drop(storage)
        used = {storage for operation in recording.operations for storage in operation.touched}
        for storage in self._roots.keys() - used:  # what the constructor left uninitialised
            self._hand_over(storage, memory, give)
            memory.drop(storage)
        return memory.most

    def _hand_over(self, storage: int, memory: _Memory, give: Give) -> None:
        for name, view in self._roots.get(storage, ()):
            give(name, memory.tensor(view))


class _Memory:
    """The storages that hold values at this moment."""

    def __init__(self, recording: _Recording) -> None:
        self._recording = recording
        self._held: dict[int, torch.UntypedStorage] = {}
        self.most = 0

    def carry_out(self, operation: _Operation) -> None:
        """Do one operation on real tensors."""
        for storage in operation.begun:
            self.drop(storage)
        args, kwargs = tree_map(self._real, operation.arguments, is_leaf=_is_kept)
        result = operation.function(*args, **kwargs)
        for view, tensor in zip(operation.results, tree_leaves(result), strict=True):
            if view is not None and view.storage not in self._held:
                self._held[view.storage] = tensor.untyped_storage()
        self._count()

    def tensor(self, view: _View) -> Tensor:
        """Return a window on a storage, which gets memory if it has none."""
        if view.storage not in self._held:
            size = self._recording.storages[view.storage].nbytes()
            self._held[view.storage] = torch.empty(size, dtype=torch.uint8).untyped_storage()
            self._count()
        empty = torch.empty(0, dtype=view.dtype)
        return empty.set_(self._held[view.storage], view.offset, view.size, view.stride)

    def drop(self, storage: int) -> None:
        """Release a storage's values."""
        self._held.pop(storage, None)

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, _View):
            return self.tensor(leaf)
        if isinstance(leaf, _Constant):
            if write_count(leaf.tensor) != leaf.version:
                raise NotRecordableError("its constructor changes a tensor that it has read before")
            return leaf.tensor
        return leaf

    def _count(self) -> None:
        self.most = max(self.most, sum(storage.nbytes() for storage in self._held.values()))


def record_init(make: Callable[[], nn.Module]) -> tuple[RecordedInit | None, str]:
    """Write down the construction of a model; where that is not possible, give None and the reason."""
    recording = _Recording()
    try:
        with (
            replaced_trunc_normal(recording.trunc_normal_),
            warnings.catch_warnings(),
            FakeTensorMode(allow_non_fake_inputs=True),
            recording,
        ):
            # copy.deepcopy asks a tensor for its address before it copies it in the right way.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            model = make()
        recording.check_end()
        return RecordedInit(model, recording), ""
    except NotRecordableError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001  (whatever is really wrong comes up again in the plain construction)
        return (
            None,
            f"its constructor looks at values ({type(error).__name__}: {str(error).splitlines()[0]:.80})",
        )


def _ends(operations: list[_Operation]) -> dict[int, list[tuple[int, bool]]]:
    """Return for each operation the storages whose values end with it: for good, or until they are written anew."""
    last: dict[int, int] = {}
    ends: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    for number, operation in enumerate(operations):
        for storage in operation.touched:
            if storage in operation.begun and storage in last:
                ends[last[storage]].append((storage, False))
            last[storage] = number
    for storage, number in last.items():
        ends[number].append((storage, True))
    return ends


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to in place."""
    found: list[Tensor] = []
    for place, argument in enumerate(arguments_of(function)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _is_kept(leaf: Any) -> bool:
    return isinstance(leaf, _View | _Constant)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _check_attributes(model: nn.Module) -> None:
    """Refuse tensors that are neither parameters nor buffers: nobody would know where to put their values."""
    for where, value in plain_tensors(model):
        if isinstance(value, FakeTensor):
            raise NotRecordableError(f"{where} is a tensor, but neither a parameter nor a buffer")


def _check_hooks(model: nn.Module) -> None:
    """Refuse hooks on parameters: they belong to objects that are replaced."""
    for name, parameter in model.named_parameters():
        if hooks_of(parameter) or post_accumulate_hooks_of(parameter):
            raise NotRecordableError(f"{name} has a hook")


def _put_on_meta(model: nn.Module) -> None:
    """Replace tensors without memory by torch's own kind of them; those that are shared stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for table in (parameters_of(module), buffers_of(module)):
            for name, tensor in list(table.items()):
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _on_meta(tensor)
                if isinstance(module, nn.RNNBase):
                    setattr(module, name, made[id(tensor)])
                else:
                    table[name] = made[id(tensor)]


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    vars(parameter).update(
        {key: value for key, value in vars(tensor).items() if not isinstance(value, Tensor)}
    )
    return parameter

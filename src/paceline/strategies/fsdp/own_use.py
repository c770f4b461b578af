"""What a loop does with sharded weights between passes, where they are DTensors: right as in one process, or refused.

Every operator on them comes by here. torch would write to the copy that a slice is, apply what is not elementwise to each
worker's rows, or end in words about DTensors. What is only read beside plain tensors, as in a call of a part of the model, is
gathered for it. What is written is noted, and compared when the workers next save or report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from paceline.compat.dispatch import arguments_of, aten_operators, name_of, overloads, returns_of
from paceline.compat.dtensor import TO_NUMBER, operator_handlers
from paceline.compat.tensors import WeakStorage, local_part, storage_key, weak_storage
from paceline.errors import InputError
from paceline.strategies.guards.writes import checksum
from paceline.world import World
from paceline.world.peer_failure_messages import names_a_lost_peer

_WHOLE = {"copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "masked_fill_"}
"""What does to a number nothing that depends on its place or on others, beside what torch calls pointwise."""
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot"}
_BETWEEN = "between passes fsdp leaves each worker some rows of it"
_ELSE = (
    "Write to the whole tensor under torch.no_grad(), weight.mul_(factors) or weight.copy_(values) say, with a tensor of its "
    "shape that is the same on all workers; or use --strategy ddp."
)


_OPERATORS = aten_operators()
"""Found when this is imported, which is before workers are forked: every one that joins would take 0.2 s for it."""
Noted = dict[int, tuple[WeakStorage, str]]
_latest: list[OwnUse] = []
"""The one that sees operators in this process, if any."""


class OwnUse:
    """Sees the operators on one model's weights, and on what is made of them."""

    def __init__(self, model: nn.Module, world: World, meets: Callable[[str], bool]) -> None:
        """`world` is everybody who writes the same; `meets` says whether all gather what has a name now, or raises."""
        self._meets = meets
        held = {name: value for name, value in model.named_parameters() if isinstance(value, DTensor)}
        self._mesh = next((one.device_mesh for one in held.values()), None)
        self._names = {_storage(one): name for name, one in held.items()}
        self._world = world
        self._copies: Noted = {}
        """What a slice or a view of a sharded tensor has come to where that is other memory, by its storage."""
        self._sums: Noted = {}
        """What was added up over several workers' rows, by its storage."""
        self._written = dict.fromkeys(held, 0)
        if _latest:
            _latest.pop().stop()
        _latest.append(self)
        self._before = {op: operator_handlers().get(op) for op in _OPERATORS}
        self._see = self._seen  # one object, by which it is found in the table again
        operator_handlers().update(dict.fromkeys(self._before, self._see))
        self.stop: finalize[..., nn.Module] = finalize(model, _take_back, self._before, self._see)
        """Sees no more: the group is left, or the model gone."""
        self.stop.atexit = False

    def forget_written(self) -> None:
        """Know that the weights are those of a state that was loaded: what this worker wrote before is no longer in them."""
        self._written = dict.fromkeys(self._written, 0)

    def check_written(self) -> None:
        """Raise on all workers where they have written other things to the weights than each other."""
        mine = torch.tensor(list(self._written.values()), dtype=torch.int64)
        rows = self._world.comm.all_gather(mine.to(self._world.device))
        for rank, row in enumerate(rows):
            if not torch.equal(row, rows[0]):
                name = list(self._written)[int((row != rows[0]).nonzero()[0])]
                raise InputError(
                    f"{name}: rank 0 and rank {rank} have written different things to it, or only one of them has, and under "
                    "fsdp each keeps its own rows. Write the same on all workers, after step.apply()."
                )

    def _seen(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sharded = [one for one in _tensors((args, kwargs)) if self._is_ours(one)]
        if not sharded:
            return self._run(op, args, kwargs)
        if op is TO_NUMBER:
            return self._number(sharded[0])
        written = _written(op, args, kwargs)
        if written:
            args, kwargs = self._check_write(op, args, kwargs, written, sharded)
        elif self._may_gather(sharded, (args, kwargs)) and self._meets(self._name(*sharded)):
            return op(*self._whole(args), **self._whole(kwargs))
        try:
            made = self._run(op, args, kwargs)
        except (RuntimeError, IndexError) as error:
            named = "DTensor" in str(error) or "harding" in str(error)  # sharding, Sharding propagation
            if names_a_lost_peer(error) or not (named or any(map(_is_empty_here, sharded))):
                raise
            self._refuse_use(op, self._name(*sharded), error)
        if not written:
            self._note(op, sharded, made)
        return made

    def _may_gather(self, sharded: list[DTensor], given: Any) -> bool:
        """Return whether these are used beside plain tensors, and can be whole: no gradient finds its way back to the rows."""
        # What has no dimension is a number, which torch takes for everybody's.
        if all(isinstance(one, DTensor) or one.dim() == 0 for one in _tensors(given)):
            return False
        wanted = torch.is_grad_enabled() and any(one.requires_grad for one in sharded)
        return not wanted and not any(map(self._is_sum, sharded))

    def _is_sum(self, one: DTensor) -> bool:
        return _storage(one) in self._sums or any(map(_adds, one.placements))

    def _whole(self, value: Any) -> Any:
        """Return what is given to an operator with sharded tensors gathered, where those that were offloaded are computed."""

        def gather(one: Tensor) -> Tensor:
            if not isinstance(one, DTensor) or not self._is_ours(one):
                return one
            # By the strides of one process: a product of what was turned adds in another order where it lies otherwise.
            made = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=self._world.device)
            return made.copy_(one.full_tensor())

        return _mapped(value, gather)

    def _number(self, one: DTensor) -> Any:
        """Return the number that one process has, on all workers; torch would make it of this worker's rows."""
        # A bool is a way that a loop takes, or nn.init.trunc_normal_; it is added up without rounding.
        if one.dtype is not torch.bool and self._is_sum(one):
            raise InputError(
                f"{self._name(one)}: a number is made of a sum over it (a norm, a mean), but {_BETWEEN}, and their sums are "
                "added up in another order than in one process. Compute it of weight.full_tensor(), on all workers together."
            )
        return one.full_tensor().item()

    def _run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, table = self._before[op], operator_handlers()
        if before is not None:
            return before(op, args, kwargs)
        taken = table.pop(op, None)  # it would be called again
        try:
            return op(*args, **kwargs)
        finally:
            if taken is not None and self.stop.alive:
                table[op] = taken

    def _check_write(
        self,
        op: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Tensor],
        sharded: list[DTensor],
    ) -> tuple[Any, Any]:
        """Refuse what would be lost or come out otherwise; return the arguments with plain tensors as everybody's."""
        name = self._name(*sharded)
        for one in written:
            if not self._is_ours(one):
                raise InputError(
                    f"{_short(op)} writes {name} into a plain tensor (a buffer, an average of weights), but {_BETWEEN}. Make "
                    "that tensor of the weight, after run.prepare (weight.detach().clone()), or use --strategy ddp."
                )
            if _storage(one) in self._copies:
                raise InputError(
                    f"{self._name(one)}: {_short(op)} writes to a part of it (an index, a slice, a row, a view), but {_BETWEEN}, "
                    f"so that this part is a copy and the write would be lost. {_ELSE}"
                )
        if not _is_elementwise(op):
            raise InputError(
                f"{self._name(written[0])}: {_short(op)} writes to it by the place of a number (an index, a mask, a diagonal) or "
                f"draws, but {_BETWEEN}. {_ELSE}"
            )
        added, told = [one for one in sharded if _storage(one) in self._sums], ""
        if any(_storage(one) in self._names for one in written):
            told = _told(op, args, kwargs)
        for target in written:
            sums = [one for one in added if one is not target]
            if sums and _storage(target) in self._names:
                raise InputError(
                    f"{self._name(target)}: {_short(op)} writes what was added up over the rows of several workers (a norm or a "
                    "sum over the first dimension, a product), in another order than in one process. Compute it of "
                    "weight.full_tensor(), or use --strategy ddp."
                )
            if sums:
                self._remember(self._sums, target, self._name(target))
            self._take_down(target, told)
        return self._shared(args), self._shared(kwargs)

    def _take_down(self, target: Tensor, told: str) -> None:
        name = self._names.get(_storage(target))
        if name is not None:
            digest = hashlib.sha256(f"{self._written[name]} {told}".encode()).digest()
            self._written[name] = int.from_bytes(digest[:7], "big")

    def _shared(self, value: Any) -> Any:
        """Return what is given to an operator with plain tensors as sharded ones of which every worker has all."""
        places = [Replicate()] * self._mesh.ndim  # type: ignore[union-attr]

        def share(one: Tensor) -> Tensor:
            sharded = isinstance(one, DTensor)
            return one if sharded else DTensor.from_local(one, self._mesh, places, run_check=False)

        return _mapped(value, share)

    def _note(self, op: Any, sharded: list[DTensor], made: Any) -> None:
        """Remember what became a copy, and what became a sum over workers."""
        first = sharded[0]
        known = _storage(first)
        adds = _short(op) in _PRODUCTS or any(_storage(one) in self._sums for one in sharded)
        for one in _tensors(made):
            if not self._is_ours(one):
                continue
            if _is_view(op) and _storage(one) != known:
                self._remember(self._copies, one, self._name(first))
            if adds or any(map(_adds, one.placements)):
                self._remember(self._sums, one, self._name(*sharded))

    def _remember(self, where: Noted, tensor: Tensor, name: str) -> None:
        for key in [key for key, (kept, _) in where.items() if kept.expired()]:
            del where[key]
        # Held weakly, its record stays and its address is given to nothing else.
        where[_storage(tensor)] = weak_storage(local_part(tensor).untyped_storage()), name

    def _is_ours(self, tensor: object) -> bool:
        return isinstance(tensor, DTensor) and tensor.device_mesh == self._mesh

    def _name(self, *tensors: Tensor) -> str:
        """Return the weight that one of these is, or was made of."""
        keys = [_storage(one) for one in tensors]
        for found in (self._names, self._copies, self._sums):
            for key in keys:
                if key in found:
                    name = found[key]
                    return name if isinstance(name, str) else str(name[1])
        return f"a sharded tensor of shape {tuple(tensors[0].shape)}"

    def _refuse_use(self, op: Any, name: str, error: Exception) -> NoReturn:
        if "mixed torch.Tensor and DTensor" in str(error):
            raise InputError(
                f"{name} is used outside of a forward pass of the model ({_short(op)}, beside a plain tensor), but {_BETWEEN}. "
                "Call the module behind step.apply() under torch.no_grad(), on all workers together, which gathers them; or "
                "model(x) itself; measure with run.evaluate; take the weight whole (weight.full_tensor()); or use --strategy ddp."
            ) from error
        raise InputError(
            f"{name}: {_short(op)} cannot be computed of it, because {_BETWEEN} ({_first_line(error)}). Read "
            f"weight.full_tensor(). {_ELSE}"
        ) from error


def _take_back(before: dict[Any, Any], mine: Any) -> None:
    table = operator_handlers()
    for op, handler in before.items():
        if table.get(op) == mine:
            table[op] = handler
            if handler is None:
                del table[op]


def _told(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what a write says, by which workers compare what they wrote."""
    told = hashlib.sha256(str(op).encode())
    for one in _leaves((args, kwargs)):
        if isinstance(one, Tensor):
            told.update(b"" if isinstance(one, DTensor) else str(checksum(one)).encode())
        elif not isinstance(one, torch.Generator):
            told.update(repr(one).encode())
    return told.hexdigest()


def _is_empty_here(tensor: DTensor) -> bool:
    return local_part(tensor).numel() == 0 < tensor.numel()


def _storage(tensor: Tensor) -> int:
    return storage_key(local_part(tensor).untyped_storage())


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _mapped(value: Any, change: Callable[[Any], Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(one, change) for one in value)
    return change(value) if isinstance(value, Tensor) else value


def _tensors(value: Any) -> Iterator[Any]:
    return (one for one in _leaves(value) if isinstance(one, Tensor))


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator is about to change."""
    found = [kwargs.get(name) if place >= len(args) else args[place] for place, name in _changed(op)]
    return list(_tensors(found))


@cache
def _changed(op: Any) -> list[tuple[int, str]]:
    if _short(op) == "detach_":
        return []  # no value changes
    return [
        (place, one.name)
        for place, one in enumerate(arguments_of(op))
        if one.alias_info is not None and one.alias_info.is_write
    ]


@cache
def _is_view(op: Any) -> bool:
    return not _changed(op) and any(one.alias_info is not None for one in returns_of(op))


@cache
def _is_elementwise(op: Any) -> bool:
    """Return whether an operator does to each number what depends on that number, and on those at its place, alone."""
    name = _short(op)
    if name in _WHOLE or name.startswith(("_foreach_", "_fused_")):
        return True
    kinds = [op, *overloads(name), *overloads(name.removesuffix("_"))]  # abs_ does not say so, abs does
    return any(torch.Tag.pointwise in one.tags for one in kinds)


def _short(op: Any) -> str:
    return name_of(op).removeprefix("aten::")


def _adds(placement: Any) -> bool:
    return placement.is_partial() and getattr(placement, "reduce_op", "sum") not in ("max", "min")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]

"""Buffers that a forward pass changes, BatchNorm's running statistics first of all.

Every shard of a step starts from the same buffers. What the shards made of them is combined by a rule, in the order
of the shards, so buffers too are the same for any number of workers. A buffer that nobody has a rule for must come
out equal on all shards; one that does not is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import NoReturn

import torch
from torch import Tensor, nn

from paceline.compat.modules import NormWithStatistics, buffers_of
from paceline.compat.tensors import write_count
from paceline.data import owned_shards
from paceline.errors import InputError, UnknownNameError
from paceline.reduce.tree import TreeSum
from paceline.strategies.buffers.unsaved import unsaved
from paceline.strategies.guards.same_values import same_numbers
from paceline.strategies.guards.writes import digest
from paceline.world import World

Rule = str | Callable[[Tensor, list[Tensor]], Tensor]
"""A name below, or a function of the value before the step and the values that the shards made of it."""
Row = list[Tensor]
Rows = dict[int, Row]
Versions = dict[str, tuple[int, int]]
"""What tells whether a buffer was written to or replaced."""
Gather = Callable[[Rows], Rows]


def _mean(before: Tensor, values: list[Tensor]) -> Tensor:
    if before.dtype.is_floating_point or before.dtype.is_complex or before.dtype == torch.bool:
        return (_total([_wide(value) for value in values]) / len(values)).to(before.dtype)
    return _whole_mean(values).to(before.dtype)


def _wide(value: Tensor) -> Tensor:
    """Return a value in a type in which a few of its kind can be added up: 16 bits end at 65504."""
    if value.dtype.is_complex:
        return value.to(torch.promote_types(value.dtype, torch.complex64))
    return value if value.dtype.is_floating_point and value.element_size() >= 4 else value.float()


def _whole_mean(values: list[Tensor]) -> Tensor:
    """Return the mean of whole numbers, cut off towards 0: their sum may not fit their type, nor a quotient 32 bits."""
    count = len(values)
    wide = [value.to(torch.int64) for value in values]
    floors = torch.stack([value.div(count, rounding_mode="floor") for value in wide]).sum(0)
    rests = torch.stack([value.remainder(count) for value in wide]).sum(0)
    floors += rests.div(count, rounding_mode="floor")
    return floors + ((floors < 0) & (rests.remainder(count) != 0))


def _added(before: Tensor, values: list[Tensor]) -> Tensor:
    return before + _total([value - before for value in values])


RULES: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "mean": _mean,
    "sum": _added,
    "max": lambda _, values: torch.stack(values).amax(0),
    "min": lambda _, values: torch.stack(values).amin(0),
    "first": lambda _, values: values[0],
}

_HELD_ONLY = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Types that torch holds numbers in and computes little with, as it does with floating-point numbers of 8 bits."""


class Buffers:
    """The changing buffers of one model through one step."""

    def __init__(self, model: nn.Module, rules: Mapping[str, Rule], shards: int) -> None:
        self.model = model
        self._several = shards > 1
        self.active = self._several and any(map(buffers_of, model.modules()))  # None included
        self.names: list[str] | None = None
        """Which ones change; None until a first step has shown it."""
        self._rules = {**_batch_norm(model), **_expand(rules, model)}
        self._before: dict[str, Tensor] = {}
        self._rows: dict[int, dict[str, Tensor]] = {}
        self._touched = self._looks = False
        self._steps = 0
        self.watched = False
        """Whether the passes of this step may have to do with them."""
        self.follows_writes = True
        """Whether a write alone makes a buffer a changing one; not where others put buffers back in between."""
        self.refuses_unsaved = True
        """Whether a buffer that no state holds may not change; off where the replica holds those, too."""

    def begin(self) -> None:
        """Note where every shard of this step starts from."""
        self._steps += 1
        # For a write through `.data`, which nobody counts, all buffers are compared by value: now and then.
        self._looks = self._steps.bit_count() == 1
        self.watched = self.active or (self._several and self._looks)
        if self.active:
            held = dict(self.model.named_buffers())
            gone = next((name for name in self.names or () if name not in held), None)
            if gone is not None:
                self._refuse_form(f"{gone} was taken away")
            names = held if self.names is None or self._looks else self.names
            self._before = {name: held[name].clone() for name in names}
            self._rows = {}
            self._touched = False

    @property
    def looks_next(self) -> bool:
        """Whether the next step compares buffers by their values."""
        return self._several and (self._steps + 1).bit_count() == 1

    def open_shard(self, model: nn.Module) -> Versions:
        """Start a shard from the buffers as they were before the step; `model` may be a replica."""
        if not self.active:
            return {}
        held = dict(model.named_buffers())
        if self._touched or model is not self.model:
            for name, before in self._before.items():
                # One that is only looked at is left alone: whoever counts writes would take this one for the model's, and
                # where it lies in the memory of a weight for one to that.
                if name in (self.names or ()) or not _equal(held[name], before):
                    held[name].copy_(before)
        self._touched = True
        return {name: mark(value) for name, value in held.items()}

    def close_shard(self, index: int, model: nn.Module, versions: Versions) -> None:
        """Keep what a shard made of them."""
        if not self.active:
            return
        held = dict(model.named_buffers())
        self._check_forms(held, versions)
        names = self.names
        if names is None:
            # By value: BatchNorm's kernels write to its statistics without counting it as a write. By writes: one of a single
            # number (the vector of a spectral norm over one output) may keep its value at first.
            names = [
                name
                for name, old in self._before.items()
                if (self.follows_writes and versions[name] != mark(held[name])) or not _equal(held[name], old)
            ]
        late = [name for name in held if name not in self._before and versions.get(name) != mark(held[name])]
        if self.names is not None:
            others = self._before.keys() - set(self.names)
            late += [name for name in held if name in others and not _equal(held[name], self._before[name])]
        if late:
            raise InputError(
                f"the buffer {late[0]} began to change after the first step, so its value before is gone. Give it a rule "
                "in the task's buffers()."
            )
        self._rows[index] = {name: held[name].clone().to(self._before[name].device) for name in names}

    def _check_forms(self, held: Mapping[str, Tensor], versions: Versions) -> None:
        """Refuse a buffer that a forward pass has given another shape or type, made, or taken away."""
        what = next((f"{name} was registered" for name in held if name not in versions), "")
        for name, before in self._before.items():
            now = held.get(name)
            if now is None:
                what = f"{name} was taken away"
            elif now.shape != before.shape or now.dtype != before.dtype:
                what = f"{name} went from {_form(before)} to {_form(now)}"
        if what:
            self._refuse_form(what)

    def _refuse_form(self, what: str) -> NoReturn:
        raise InputError(
            f"the buffer {what} in forward or between two steps, so each shard may make another one of it, and nothing says how "
            "to combine them. Register it in __init__ with its full size (a count beside it says how much is filled), or keep "
            "what grows out of the buffers and out of forward."
        )

    def _check_none(self) -> None:
        """Refuse a buffer in a model that had none to begin with; looked for now and then."""
        made = next(self.model.named_buffers(), None) if self._several and self._looks else None
        if made is not None:
            self._refuse_form(f"{made[0]} was registered")

    def combine(self, agree: Callable[[list[str]], list[str]], gather: Gather) -> None:
        """Make one value of what all shards made; `agree` and `gather` reach the other workers."""
        if not self.active:
            self._check_none()
            return
        if self.names is None:
            mine = {name for row in self._rows.values() for name in row} | set(self._rules)
            self.names = agree([name for name in self._before if name in mine])
            self._before = {name: self._before[name] for name in self.names}
        if not self.names:
            return
        rows = gather(
            {
                index: [row.get(name, self._before[name]) for name in self.names]
                for index, row in self._rows.items()
            }
        )
        held = dict(self.model.named_buffers())
        for place, name in enumerate(self.names):
            values = [rows[index][place] for index in sorted(rows)]
            held[name].copy_(self._one(name, values) if values else self._before[name])
        if self.refuses_unsaved and self._looks:
            self._check_unsaved(held)

    def _check_unsaved(self, held: Mapping[str, Tensor]) -> None:
        for name in unsaved(self.model):
            if name in (self.names or ()) and not _equal(held[name], self._before[name]):
                raise InputError(
                    f"the buffer {name} changes in training, but is registered with persistent=False, so no state of this "
                    "strategy would hold it and a resumed run would lose its value. Leave persistent=False out, or use ddp."
                )

    def put_back(self) -> None:
        """Undo what an unfinished step did to them."""
        held = dict(self.model.named_buffers())
        for name, before in self._before.items():
            held[name].copy_(before)
        self.end_step()

    def known(self) -> list[Tensor]:
        """Return those of which it is known what they were before the step."""
        return [one for name, one in self.model.named_buffers() if name in self._before]

    def end_step(self) -> None:
        """Forget where the step started from: it is finished, or undone."""
        self._before = {}

    def like(self) -> Row:
        """Return tensors with the shapes and dtypes of a row."""
        return [self._before[name] for name in self.names or []]

    def _one(self, name: str, values: list[Tensor]) -> Tensor:
        rule = self._rules.get(name)
        if isinstance(rule, str):
            _check_arithmetic(name, rule, self._before[name].dtype)
        if rule is not None:
            return (rule if callable(rule) else RULES[rule])(self._before[name], values)
        for other in values[1:]:
            if not same_numbers(values[0], other):
                raise InputError(
                    f"the buffer {name} came out differently on different shards, and no rule says how to combine it. State one "
                    f"in the task: def buffers(self): return {{{name!r}: 'mean'}} ({', '.join(list(RULES)[1:])}, or a function)."
                )
        return values[0]


def _check_arithmetic(name: str, rule: str, dtype: torch.dtype) -> None:
    """Refuse a rule that torch cannot compute with numbers of a type."""
    held_only = dtype in _HELD_ONLY or (dtype.is_floating_point and dtype.itemsize == 1)
    unordered = rule in ("max", "min") and dtype.is_complex
    if (rule in ("sum", "max", "min") and held_only) or unordered or (rule == "sum" and dtype == torch.bool):
        raise InputError(
            f"the buffer {name} is of the type {_named(dtype)}, and torch has no {rule} of it. Give it the rule 'mean' or "
            "'first', a function (value before, values of the shards), or another type."
        )


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _form(value: Tensor) -> str:
    return f"{_named(value.dtype)}{list(value.shape)}"


def _equal(now: Tensor, before: Tensor) -> bool:
    return same_numbers(now.to(before.device), before)


def mark(value: Tensor) -> tuple[int, int]:
    """Return what changes when a tensor is replaced, or written to in place other than through `.data`."""
    return id(value), write_count(value)


_MARKS = 9
"""Bytes before a row: one that says there is a row, and a number that stands for what the step began with."""


def gather_rows(rows: Rows, like: Row, world: World, shards: int) -> Rows:
    """Return the rows of all workers' shards, in one exchange of raw bytes; `like` is what the step began with on all of them."""
    most = max(len(owned_shards(rank, world.size, shards, world.shares)) for rank in range(world.size))
    length = sum(one.numel() * one.element_size() for one in like)
    mine = torch.zeros(most, _MARKS + length, dtype=torch.uint8, device=world.device)
    mine[:, 1:_MARKS] = digest(_raw(like)).view(1).view(torch.uint8)
    first = owned_shards(world.rank, world.size, shards, world.shares).start
    for index, row in rows.items():
        mine[index - first, 0] = 1
        mine[index - first, _MARKS:] = _raw(row)
    gathered: Rows = {}
    parts = world.comm.all_gather(mine)
    marks = torch.stack([part[:, :_MARKS] for part in parts]).tolist()  # a GPU is waited for once
    for rank, part in enumerate(parts):
        if marks[rank][0][1:] != marks[0][0][1:]:
            _refuse_parted(rank)
        for place, index in enumerate(owned_shards(rank, world.size, shards, world.shares)):
            if marks[rank][place][0]:
                gathered[index] = _unpack(part[place, _MARKS:], like)
    return gathered


def _refuse_parted(rank: int) -> NoReturn:
    raise InputError(
        f"buffers that training changes (BatchNorm's statistics, say) were not the same on rank 0 and rank {rank} when the step "
        "began: something between two steps moved them on some workers only, a forward pass on rank 0 without model.eval(). "
        "Measure under model.eval() or with run.evaluate, or do it alike on all workers."
    )


def _raw(row: Row) -> Tensor:
    return torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in row])


def _unpack(raw: Tensor, like: Row) -> Row:
    pieces = torch.split(raw, [one.numel() * one.element_size() for one in like])
    # A copy of its own, because a view as another type must start at a multiple of that type's size.
    return [piece.clone().view(one.dtype).view(one.shape) for piece, one in zip(pieces, like, strict=True)]


def _batch_norm(model: nn.Module) -> dict[str, Rule]:
    """Return the rules of torch's own normalisation layers; shards in unequal micro-batches count differently."""
    found: dict[str, Rule] = {}
    for path, module in model.named_modules():
        if isinstance(module, NormWithStatistics) and module.running_mean is not None:
            known = {"running_mean": "mean", "running_var": "mean", "num_batches_tracked": "max"}
            held = dict(module.named_buffers(recurse=False))
            found |= {f"{path}.{name}".lstrip("."): rule for name, rule in known.items() if name in held}
    return found


def _expand(rules: Mapping[str, Rule], model: nn.Module) -> dict[str, Rule]:
    """Turn patterns such as "*.usage" into the names of this model's buffers."""
    names = [name for name, _ in model.named_buffers()]
    found: dict[str, Rule] = {}
    for pattern, rule in rules.items():
        if isinstance(rule, str) and rule not in RULES:
            raise UnknownNameError(f"rule for the buffer {pattern}:", rule, RULES)
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise UnknownNameError("buffer", pattern, names or ["(the model has none)"])
        found |= dict.fromkeys(matching, rule)
    return found


def _total(values: list[Tensor]) -> Tensor:
    """Add the values of the shards along the tree."""
    tree = TreeSum(len(values))
    for index, value in enumerate(values):
        tree.add((index, index + 1), [value.clone()])
    total = tree.nodes[0][1][0]
    if total is None:
        raise RuntimeError("a sum of nothing")
    return total

"""Which layers are split among workers, and how: read from the task's `tensor_plan()`, or proposed from the model.

A layer split by columns makes a part of the features on each worker; what follows works on that part, until a layer split
by rows brings the parts together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NoReturn

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from paceline.errors import InputError, UnknownNameError
from paceline.strategies.tensor.layers import SequenceNorm, TransposedColumns, TransposedRows
from paceline.strategies.tensor.proposal import (
    fitting,
    has_own_weight,
    head_counts,
    is_transposed,
    join,
    linear_layers,
    propose,
    sides,
    tied_layers,
)

WORDS = ("columns", "rows")
NORMS = (nn.LayerNorm, nn.RMSNorm)


@dataclass
class TensorPlan:
    """The split layers of one model, by name."""

    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    heads: list[tuple[str, str]] = field(default_factory=list)
    """Modules and their attributes that count heads: each worker computes its part of them."""
    proposed: bool = False
    scores: str | None = None
    """The layer whose results stay split when the loss is computed."""

    @property
    def opening(self) -> list[str]:
        """Return the layers after which every worker has a part of the features."""
        return [
            name
            for name, style in self.styles.items()
            if isinstance(style, ColwiseParallel)
            and style.use_local_output
            and style.output_layouts == (Shard(-1),)
        ]

    @property
    def closing(self) -> list[str]:
        """Return the layers that bring the parts together."""
        return [
            name
            for name, style in self.styles.items()
            if isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),)
        ]

    def regions(self) -> list[str]:
        """Return the smallest modules that hold a layer of the one kind and one of the other."""
        found = dict.fromkeys(_around(name, self.closing) for name in self.opening)
        return [name for name in found if name is not None]


def make_plan(
    model: nn.Module,
    said: Mapping[str, str | ParallelStyle] | None,
    size: int,
    *,
    sequence: bool = False,
    loss: bool = False,
) -> TensorPlan:
    """Return the plan for `size` workers: what the task says, or a proposal, with what was asked for beside it."""
    scores = _scores(model, said, size) if loss else None
    words: Mapping[str, str | ParallelStyle]
    words = propose(model, size, scores) if said is None else _read(model, said)
    _check(model, {name: word for name, word in words.items() if isinstance(word, str)}, size)
    plan = TensorPlan(proposed=said is None, scores=scores)
    for name, word in words.items():
        plan.styles[name] = (
            word if isinstance(word, ParallelStyle) else _style(model.get_submodule(name), word)
        )
    if scores is not None:
        plan.styles[scores] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    if sequence:
        _split_sequence(model, plan)
    if said is None:
        plan.heads = [
            pair for name, module in model.named_modules() for pair in head_counts(name, module, plan.opening)
        ]
    return plan


def _style(layer: nn.Module, word: str) -> ParallelStyle:
    if is_transposed(layer):
        return TransposedColumns() if word == "columns" else TransposedRows()
    match word:
        case "columns":
            return ColwiseParallel()
        case "rows":
            return RowwiseParallel()
        case "columns, gathered":
            return ColwiseParallel(output_layouts=Replicate())
        case _:
            return RowwiseParallel(input_layouts=Replicate())


# What the task says.


def _read(model: nn.Module, said: Mapping[str, str | ParallelStyle]) -> dict[str, str | ParallelStyle]:
    """Turn patterns such as "blocks.*.feed_in" into the names of this model's layers."""
    # A layer that has two names may be called by either; it is split once, under its first.
    first = {module: name for name, module in reversed([*model.named_modules()])}
    names = {name: first[one] for name, one in model.named_modules(remove_duplicate=False) if name}
    found: dict[str, str | ParallelStyle] = {}
    for pattern, word in said.items():
        if isinstance(word, str) and word not in WORDS:
            raise UnknownNameError(f"way to split {pattern}:", word, WORDS)
        matching = [once for name, once in names.items() if fnmatchcase(name, pattern)]
        if not matching:
            raise UnknownNameError("layer in tensor_plan():", pattern, names)
        found |= dict.fromkeys(matching, word)
    if not found:
        raise InputError(
            "tensor_plan() names no layer, so nothing would be split. Name some, or return None."
        )
    return found


def _check(model: nn.Module, words: Mapping[str, str], size: int) -> None:
    """Refuse what cannot be split so: another kind of layer, sizes that do not divide, weights in two places."""
    tied = tied_layers(model)
    for name, word in words.items():
        layer = model.get_submodule(name)
        if not (isinstance(layer, nn.Linear | nn.Embedding) or is_transposed(layer)):
            raise InputError(
                f"tensor_plan() splits {name} by {word}, but it is a {type(layer).__name__}: only Linear and Embedding are "
                "split by a word. Name the Linear layers inside it, or give a ParallelStyle."
            )
        if not has_own_weight(layer):
            raise InputError(
                f"{name} computes its weight or bias from other parameters (weight_norm, spectral_norm, prune?), so a part of it "
                "is not what the whole has there. Leave it out of tensor_plan()."
            )
        if name in tied:
            _refuse_tied(*tied[name])
        length = _length(layer, word)
        if length % size:
            raise InputError(
                f"{name} has {length} {word.partition(',')[0]}, which tp={size} does not divide. "
                f"Use {fitting(length)}, or leave it out of tensor_plan()."
            )


def _refuse_tied(name: str, other: str) -> NoReturn:
    raise InputError(
        f"{name} is {other} too, so it cannot be split for one of them. Leave the layers of both out of tensor_plan(), or give "
        "each parameters of its own."
    )


def check_tied(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Refuse a split that made two parameters of one, whoever asked for it; `before` has it under all of its names."""
    first: dict[int, str] = {}
    after = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in before.items():
        other = first.setdefault(id(parameter), name)
        if after[name] is not after[other]:
            _refuse_tied(other, name)


def check_divided(model: nn.Module, size: int) -> None:
    """Refuse parts of unequal size, whoever asked for them."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            for placement in parameter.placements:
                if isinstance(placement, Shard) and parameter.shape[placement.dim] % size:
                    length = parameter.shape[placement.dim]
                    raise InputError(
                        f"{name} is split along a dimension of size {length}, which tp={size} does not divide. "
                        f"Use {fitting(length)}, or leave its layer out of tensor_plan()."
                    )


def _length(layer: nn.Module, word: str) -> int:
    if not isinstance(layer, nn.Embedding):
        return sides(layer)[word.startswith("columns")]
    return layer.embedding_dim if word.startswith("columns") else layer.num_embeddings


# What was asked for beside it.


def _scores(model: nn.Module, said: Mapping[str, str | ParallelStyle] | None, size: int) -> str:
    """Find the layer that makes the scores: the last Linear of the model."""
    found = linear_layers(model)
    if not found:
        raise InputError(
            "--loss-parallel splits the last Linear layer of the model, and this model has none."
        )
    name, layer = found[-1]
    words = {} if said is None else _read(model, said)
    if words.get(name, "columns") != "columns":
        raise InputError(
            f"--loss-parallel splits {name}, the last Linear layer, by columns, but tensor_plan() splits it differently. "
            "Leave it out of the plan, or leave out --loss-parallel."
        )
    if layer.out_features % size:
        raise InputError(
            f"--loss-parallel splits the {layer.out_features} scores of {name}, which tp={size} does not divide. "
            f"Use {fitting(layer.out_features)}, or leave out --loss-parallel."
        )
    _check(model, {name: "columns"}, size)
    return name


def _split_sequence(model: nn.Module, plan: TensorPlan) -> None:
    """Split the sequence for each norm that stands right before a layer split by columns."""
    opening = plan.opening
    norms = 0
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in opening):
        before: str | None = None
        width: tuple[int, ...] = ()
        for child, layer in model.get_submodule(parent).named_children():
            name = join(parent, child)
            if isinstance(layer, NORMS):
                before, width = name, tuple(layer.normalized_shape)
            elif before is not None and name in opening and getattr(layer, "in_features", 0) == width[-1]:
                plan.styles[before], plan.styles[name] = (
                    SequenceNorm(),
                    ColwiseParallel(input_layouts=Shard(1)),
                )
                norms += 1
            else:
                before = None
    if not norms:
        raise InputError(
            f"--sequence-parallel finds no LayerNorm or RMSNorm right before one of the {len(opening)} layers split by "
            "columns. Leave it out, or give torch's own SequenceParallel styles in tensor_plan()."
        )


def _around(name: str, closing: list[str]) -> str | None:
    while name:
        name = name.rpartition(".")[0]
        if any(other.startswith(f"{name}." if name else "") for other in closing):
            return name
    return None

"""Proposes which layers are split: pairs of Linear layers (or of transformers' Conv1D), the first by columns, the second by rows.

An MLP's, attention's with separate query, key and value, neighbours in an `nn.Sequential`; without any pair, single
layers whose results are gathered at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeGuard

from torch import nn

from paceline.compat.modules import parameters_of
from paceline.errors import InputError

ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.Tanh, nn.Sigmoid, nn.Softplus,
    nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, nn.Softsign, nn.Identity, nn.Dropout,
)  # fmt: skip
"""What may stand between the two layers of a pair: it makes each value of that value alone."""
QUERY, KEY, VALUE, OUT = (
    {"q", "q_proj", "query", "wq", "to_q"},
    {"k", "k_proj", "key", "wk", "to_k"},
    {"v", "v_proj", "value", "wv", "to_v"},
    {"o", "o_proj", "out", "out_proj", "output", "wo", "to_out", "proj"},
)
HEADS = ("heads", "n_heads", "n_head", "num_heads", "num_attention_heads")
KEY_HEADS = ("kv_heads", "n_kv_heads", "num_kv_heads", "num_key_value_heads")


def propose(model: nn.Module, size: int, scores: str | None) -> dict[str, str]:
    """Return layers and the words for how each is split; `scores` is spoken for."""
    left_alone = {*tied_layers(model), *([] if scores is None else [scores])}
    lent, by_heads = _lent(model), _by_heads(model)
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        children = {
            child: layer
            for child, layer in module.named_children()
            if (is_plain(layer) or is_transposed(layer))
            and join(name, child) not in left_alone
            and layer not in lent
            and not (type(module) in by_heads and child in QUERY | KEY | VALUE | OUT)
        }
        find = _neighbours if isinstance(module, nn.Sequential) else _pairs
        for columns, rows in find(module, children, size):
            found |= {join(name, child): "columns" for child in columns} | {join(name, rows): "rows"}
    if found or scores is not None:
        return found
    linear = {name: layer for name, layer in linear_layers(model) if name not in left_alone}
    for name, layer in linear.items():
        if layer.in_features % size == 0:
            found[name] = "rows of the whole"
        elif layer.out_features % size == 0:
            found[name] = "columns, gathered"
    if not found:
        lengths = [side for layer in linear.values() for side in sides(layer)]
        seen = ", ".join(
            f"{name} {layer.in_features}x{layer.out_features}" for name, layer in [*linear.items()][:5]
        )
        raise InputError(
            f"tp={size} finds no layer to split: it looked for Linear layers of this model with a side that {size} divides, "
            f"and found {seen or 'no Linear layer'}. Use {fitting(*lengths)}, or say what to split in the task's tensor_plan()."
        )
    return found


def _neighbours(
    module: nn.Module, linear: Mapping[str, nn.Module], size: int
) -> Iterator[tuple[list[str], str]]:
    """Find pairs in a Sequential: nothing between the two but what works on each value alone."""
    before: str | None = None
    for name, layer in module.named_children():
        if name in linear and before is not None and sides(linear[name])[0] % size == 0:
            yield [before], name
            before = None
        elif name in linear:
            before = name
        elif type(layer) not in ELEMENTWISE:
            before = None


def _pairs(module: nn.Module, linear: Mapping[str, nn.Module], size: int) -> Iterator[tuple[list[str], str]]:
    """Find attention's four layers by their names, and an MLP by its wider hidden features, which no other layer has."""
    attention = [next((name for name in linear if name in known), None) for known in (QUERY, KEY, VALUE, OUT)]
    query, key, value, out = attention
    if query and key and value and out and _divides_heads(module, size) and sides(linear[out])[0] % size == 0:
        yield [query, key, value], out
    if not (query or key or value):
        attention = []  # an MLP's second layer may be called like attention's last
    others = {name: layer for name, layer in linear.items() if name not in attention}
    for name, down in others.items():
        hidden, width = sides(down)
        ups = [up for up, layer in others.items() if sides(layer) == (width, hidden)]
        rivals = [
            layer
            for other, layer in module.named_children()
            if other != name and other not in ups and any(hidden in one.shape for one in layer.parameters())
        ]
        if hidden > width and hidden % size == 0 and ups and not rivals:
            yield ups, name


def _lent(model: nn.Module) -> set[nn.Module]:
    """Return the modules that two others hold: what is a pair with one of them need not be with the other."""
    held = [child for module in model.modules() for child in module.children()]
    return {child for child, parents in Counter(held).items() if parents > 1}


def _by_heads(model: nn.Module) -> set[type[nn.Module]]:
    """Return the kinds of attention of which one holds something for each head: it adds that in all of them, or hands it on."""
    found: set[type[nn.Module]] = set()
    for module in model.modules():
        heads = {count for name in HEADS if isinstance(count := getattr(module, name, None), int)}
        for name, child in module.named_children():
            if name not in QUERY | KEY | VALUE | OUT and any(
                one.dim() > 1 and heads & set(one.shape) for one in child.parameters()
            ):
                found.add(type(module))
    return found


def _divides_heads(module: nn.Module, size: int) -> bool:
    counts = [count for name in (*HEADS, *KEY_HEADS) if isinstance(count := getattr(module, name, None), int)]
    return bool(counts) and all(count % size == 0 for count in counts)


def head_counts(name: str, module: nn.Module, split: Iterable[str]) -> list[tuple[str, str]]:
    """Return the attributes of an attention module that is split by its heads."""
    if not any(join(name, query) in split for query in QUERY):
        return []
    return [(name, each) for each in (*HEADS, *KEY_HEADS) if isinstance(getattr(module, each, None), int)]


def tied_layers(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Return the layers of which a parameter is held elsewhere too, with that parameter's name here and there."""
    places: dict[int, list[tuple[str, str]]] = {}
    for layer, module in model.named_modules():
        # Asked for as an attribute, a parametrized weight would be computed, and spectral norm takes a step in that.
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((layer, join(layer, name)))
    tied: dict[str, tuple[str, str]] = {}
    for held in places.values():
        for layer, name in held:
            for _, other in held:
                if other != name:
                    tied.setdefault(layer, (name, other))
    return tied


def fitting(*lengths: int) -> str:
    """Return by how many workers some of these lengths can be split."""
    sizes = [str(size) for size in range(2, 65) if any(length % size == 0 for length in lengths)]
    return f"a tp of {', '.join(sizes[:6])}" if sizes else "no tp"


def linear_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return the plain Linear layers of a model by name."""
    return [(name, layer) for name, layer in model.named_modules() if is_plain(layer)]


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer is a Linear with a weight of its own, not one that is computed from others."""
    # Exactly this type: torch's own attention has subclasses of it whose forward is never called.
    return type(layer) is nn.Linear and has_own_weight(layer)


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is a Conv1D of transformers': a Linear that holds its weight as (inputs, outputs)."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") and has_own_weight(layer)


def sides(layer: nn.Module) -> tuple[int, int]:
    """Return the inputs and the outputs of a Linear, or of a transposed one."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    inputs, outputs = layer.get_parameter("weight").shape
    return inputs, outputs


def has_own_weight(layer: nn.Module) -> bool:
    """Return whether a layer's weight and bias are parameters: weight_norm, spectral_norm and prune compute them from others."""
    own = dict(layer.named_parameters(recurse=False))
    return "weight" in own and ("bias" in own or getattr(layer, "bias", None) is None)


def join(parent: str, child: str) -> str:
    """Return the name of a module's child."""
    return f"{parent}.{child}" if parent else child

"""What the items of a batch hold, in a form that workers can compare: one hash for each place in them.

Tensors, arrays, pictures, strings, numbers and containers of them are looked into. Whatever else an item holds (open files,
sets, objects of its own) is passed over, and so are a dict's order and the folder in a path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

ITEMS, PLACES, MEMBERS = 8, 64, 16
"""How many items of a batch are looked at, places in each, and members of a list one by one."""
ELEMENTS = 1 << 16
"""How many elements of a tensor are hashed, spread over it: half a millisecond."""
ORDER, PARTS = "the order", "the parts"
"""The only place of what workers compare of an order of the run's own, and of a source of parts."""
_SHOWN = 40
_NUMBERS = "biufc"
_Scalar = bool | int | float | complex | str | bytes | np.generic | None


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest place in which items differ, and how it begins in the first of them here and there."""

    place: str
    here: str
    there: str


def contents_of(batch: list[Any]) -> str | None:
    """Return the contents of a batch's items; None where it has a single one, or nothing that can be compared."""
    if len(batch) < 2:
        return None
    numbers = sorted({(len(batch) - 1) * one // (ITEMS - 1) for one in range(ITEMS)})
    found: dict[str, list[tuple[bytes, int, str]]] = {}
    for number in numbers:
        try:
            for place, value in islice(_places(batch[number], "item"), PLACES):
                found.setdefault(place, []).append(_hashed(value))
        except Exception:  # noqa: BLE001, S112 - an item's own classes may refuse to be looked at
            continue
    contents = {
        place: [
            blake2b(b"".join(one for one, _, _ in leaves), digest_size=8).hexdigest(),
            sum(size for _, size, _ in leaves),
            len({one for one, _, _ in leaves}) > 1,
            leaves[0][2],
        ]
        for place, leaves in found.items()
    }
    return json.dumps(contents) if contents else None


def compare(mine: str, theirs: str) -> Difference | None:
    """Return where two batches differ, if they hold other items.

    They do where at least half of what changes from item to item differs, by its size: a time of reading or a random name
    beside equal samples that are larger makes no difference.
    """
    here, there = json.loads(mine), json.loads(theirs)
    absent = [None, 0, False, "nothing"]
    both = {
        place: (here.get(place, absent), there.get(place, absent)) for place in dict.fromkeys([*here, *there])
    }
    differing = {place: max(one[1], other[1]) for place, (one, other) in both.items() if one[0] != other[0]}
    same = sum(one[1] for one, other in both.values() if one[0] == other[0] and one[2])
    if not differing or sum(differing.values()) < same:
        return None
    largest = max(differing, key=lambda place: differing[place])
    here, there = both[largest][0][3], both[largest][1][3]  # of the first item
    return Difference(largest, here, there if here != there else f"{there} with others after it")


def places_of(item: Any) -> dict[str, tuple[str, int, str]]:
    """Return for each place in an item that can be compared its hash, its size in bytes and how it begins."""
    found = {}
    for place, value in islice(_places(item, "item"), PLACES):
        one, size, shown = _hashed(value)
        found[place] = one.hex(), size, shown
    return found


def _places(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield what can be hashed in an item, and where it is."""
    if isinstance(value, Mapping):
        for key in sorted(key for key in value if isinstance(key, str)):
            yield from _places(value[key], f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        if len(value) > MEMBERS and all(isinstance(one, _Scalar) for one in value):
            yield place, value
        else:
            for number, one in enumerate(value[:MEMBERS]):
                yield from _places(one, f"{place}[{number}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _places(getattr(value, field.name), f"{place}.{field.name}")
    elif _can_be_hashed(value):
        yield place, value
    elif isinstance(tile := getattr(value, "tile", None), list) and tile:
        # A picture of PIL's that is not decoded yet, and stays so: what it is drafted or thumbnailed to would be another.
        yield from _places(getattr(value, "filename", None) or (), f"{place}.filename")
    elif hasattr(type(value), "__array_interface__") and not isinstance(value, np.ndarray):
        yield from _places(np.asarray(value), place)


def _can_be_hashed(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.layout == torch.strided and not (value.is_meta or value.is_quantized or value.is_nested)
    return isinstance(value, _Scalar) or (isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS)


def _hashed(value: Any) -> tuple[bytes, int, str]:
    """Return the hash of a value, its size in bytes, and how it begins."""
    if isinstance(value, Tensor):
        flat = value.detach().as_subclass(Tensor).resolve_conj().resolve_neg().reshape(-1)
        some = flat[:: -(-flat.numel() // ELEMENTS) or 1].cpu().contiguous()
        head = f"{value.dtype} {tuple(value.shape)}"
        data, size = some.view(torch.uint8).numpy().tobytes(), flat.numel() * flat.element_size()
        shown = _beginning(some[:3].tolist(), flat.numel())
    elif isinstance(value, np.ndarray):
        flat_array = value.reshape(-1)
        head, size = f"{value.dtype} {value.shape}", value.nbytes
        data = flat_array[:: -(-flat_array.size // ELEMENTS) or 1].tobytes()
        shown = _beginning(flat_array[:3].tolist(), flat_array.size)
    else:
        said = value.rsplit("/", 1)[-1] if isinstance(value, str) else value
        head, data = type(value).__name__, repr(said).encode()
        size = len(data) if isinstance(value, str | bytes | list | tuple) else 8
        shown = repr(said)
    return blake2b(data, key=head.encode()[:64], digest_size=8).digest(), size, shown[:_SHOWN]


def _beginning(numbers: list[Any], length: int) -> str:
    said = [f"{one:.4g}" if isinstance(one, float) else str(one) for one in numbers]
    return f"[{', '.join(said)}{', ...' if length > len(numbers) else ''}]"

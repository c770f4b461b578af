"""A batch of any make arrives on the device with its make unchanged."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from paceline.data import copied, to_device


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Tensor
    name: str
    derived: int = field(init=False, default=7)


class Graph:
    def __init__(self, device: str) -> None:
        self.device = device

    def to(self, device: str) -> Graph:
        return Graph(device)


def test_everything_that_can_move_moves_and_the_rest_stays() -> None:
    value = torch.ones(2)
    table: defaultdict[str, Tensor] = defaultdict(lambda: value, a=value)
    batch = {
        "tuple": (value, "text", None),
        "pair": Pair(value, [value, 3]),
        "frozen": Frozen(value, "name"),
        "ordered": OrderedDict(b=value, a=value),
        "table": table,
        "graph": Graph("cpu"),
        "packed": pack_sequence([value]),
    }
    moved = to_device(batch, "meta")
    assert [type(part) for part in moved.values()] == [type(part) for part in batch.values()]
    assert moved["tuple"][0].is_meta
    assert moved["tuple"][1:] == ("text", None)
    assert moved["pair"].left.is_meta
    assert moved["pair"].right[0].is_meta
    assert moved["pair"].right[1] == 3
    assert moved["frozen"].value.is_meta
    assert (moved["frozen"].name, moved["frozen"].derived) == ("name", 7)
    assert list(moved["ordered"]) == ["b", "a"]
    assert moved["ordered"]["a"].is_meta
    assert moved["table"]["a"].is_meta
    assert moved["table"].default_factory is table.default_factory
    assert moved["graph"].device == "meta"
    assert moved["packed"].data.is_meta
    assert not value.is_meta
    assert batch["frozen"].value is value


def test_a_tensor_already_there_is_not_copied() -> None:
    value = torch.ones(2)
    assert to_device([value], torch.device("cpu"))[0] is value


def test_a_copy_shares_no_memory_but_keeps_what_is_the_same_thing_twice() -> None:
    whole = torch.arange(1000.0)
    row, graph = whole[:2], torch.ones(2, requires_grad=True) * 2
    source = (number for number in range(3))  # cannot be copied
    batch: dict[str, Any] = {
        "row": row,
        "again": row,
        "pair": Pair(graph, [whole]),
        "table": {"a": {"b": [torch.ones(2)]}},
    }
    for one in (batch, {**batch, "source": source}):
        made = copied(one)
        assert made["row"].untyped_storage().nbytes() < 100
        assert not made["pair"].left.requires_grad
        for tensor in (made["row"], made["pair"].left, made["pair"].right[0], made["table"]["a"]["b"][0]):
            tensor.zero_()
        assert (whole.sum(), graph.sum(), batch["table"]["a"]["b"][0].sum()) == (499500, 4, 2)
        assert made.get("source") is one.get("source")
    made = copied(batch)
    assert made["row"] is made["again"]

"""A copy of a batch shares no memory with it, and what is no part of a batch is handed on."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, IterableDataset

from paceline.data import copied, copying
from tests.unit.data.sources import Squares, epoch_of


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Tensor
    names: list[str]


class Batch:
    """One of the user's own."""

    def __init__(self, values: Tensor, array: Any, lengths: list[int]) -> None:
        self.values, self.array, self.lengths = values, array, lengths


class Slotted:
    __slots__ = ("inner", "values")

    def __init__(self, values: Tensor, inner: Batch) -> None:
        self.values, self.inner = values, inner


class Vocabulary:
    """Holds no tensor."""

    def __init__(self) -> None:
        self.places = {"a": 0, "b": 1}


class Whole(Dataset[Any]):
    def __init__(self) -> None:
        self.values = torch.ones(4)


class Itself:
    """Says by itself how it is copied."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __deepcopy__(self, memo: dict[int, Any]) -> Itself:
        made = Itself(memo.get(id(self.values), self.values))
        vars(made)["copied"] = True
        return made


class Broken:
    def __init__(self) -> None:
        self.values = torch.ones(1)

    def __copy__(self) -> Broken:
        raise TypeError("there is one of me")


def test_tensors_and_arrays_are_copied_wherever_a_batch_holds_them() -> None:
    value, array = torch.ones(2), np.ones(2)
    batch: dict[str, Any] = {
        "pair": Pair(value, [array]),
        "frozen": Frozen(value, ["name"]),
        "ordered": OrderedDict(b=value, a=array),
        "deque": deque([value]),
        "objects": np.array([value, None, "text"], dtype=object),
        "own": Batch(value, array, [1, 2]),
        "slots": Slotted(value, Batch(value, array, [3])),
        "packed": pack_sequence([value]),
        "itself": Itself(value),
        "bytes": bytearray(b"ab"),
        "numbers": [1, 2],
        "size": value.shape,
        "largest": torch.ones(2, 2).max(0),
    }
    made = copied(batch)
    assert [type(part) for part in made.values()] == [type(part) for part in batch.values()]
    value.zero_()
    array[:] = 0
    batch["own"].lengths[0] = batch["numbers"][0] = batch["bytes"][0] = 0
    batch["frozen"].names.append("other")
    tensors = (
        made["pair"].left,
        made["frozen"].value,
        made["ordered"]["b"],
        made["deque"][0],
        made["objects"][0],
        made["own"].values,
        made["slots"].values,
        made["slots"].inner.values,
        made["itself"].values,
    )
    assert all(one.tolist() == [1, 1] for one in tensors)
    assert all(one is made["pair"].left for one in tensors)
    arrays = (made["pair"].right[0], made["ordered"]["a"], made["own"].array, made["slots"].inner.array)
    assert all(one.tolist() == [1, 1] for one in arrays)
    assert (made["own"].lengths, made["slots"].inner.lengths, made["numbers"]) == ([1, 2], [3], [1, 2])
    assert (made["bytes"], made["frozen"].names, made["size"]) == (b"ab", ["name"], value.shape)
    assert made["packed"].data.tolist() == [1, 1]
    assert made["itself"].copied


def test_what_is_no_part_of_a_batch_is_handed_on() -> None:
    batch: list[Any] = [Vocabulary(), Whole(), nn.Linear(2, 2), Broken(), object(), iter([1]), Vocabulary]
    assert all(one is other for one, other in zip(copied(batch), batch, strict=True))


def test_so_is_an_object_that_holds_more_than_a_batch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    store, batch = Batch(torch.ones(1000), None, []), Batch(torch.ones(9), None, [])
    monkeypatch.setattr(copying, "LARGEST", 3999)
    made = copied([store, batch])
    assert made[0] is store
    assert made[1] is not batch
    many = Batch(torch.ones(1), None, [Vocabulary() for _ in range(20_000)])  # type: ignore[misc]
    assert copied(many) is many


def test_a_copy_is_made_of_what_it_was_while_others_come_to_lie_where_it_was() -> None:
    for _ in range(200):
        made = copied([[torch.ones(1)], {"a": torch.ones(1)}, {"b": {"c": np.ones(1)}}])
        assert [type(one) for one in made] == [list, dict, dict]
        assert made[2]["b"]["c"].tolist() == [1]


class Refilled:
    """Collates into the same object each time, and hands on what it looks up."""

    def __init__(self) -> None:
        self.batch = Batch(torch.zeros(2), np.zeros(2), [0, 0])
        self.vocabulary = Vocabulary()

    def __call__(self, items: list[Any]) -> Any:
        for place, item in enumerate(items):
            number = float(item)
            self.batch.values[place] = self.batch.array[place] = number
            self.batch.lengths[place] = int(number)
        return self.batch, self.vocabulary


class Counted(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize("source", [lambda: Squares(8), Counted])
def test_an_object_that_collate_fills_again_is_another_in_each_batch(source: Any) -> None:
    collate = Refilled()
    steps = epoch_of(source(), collate=collate, shards=2, batch_size=8, micro_batch=2)
    batches = [batch for step in steps for shard in step.shards for batch in shard.batches]
    assert len({id(batch) for batch, _ in batches}) == 4
    assert len({tuple(batch.values.tolist()) for batch, _ in batches}) == 4
    for batch, vocabulary in batches:
        assert batch.values.tolist() == batch.array.tolist() == batch.lengths
        assert vocabulary is collate.vocabulary


class Holder:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


@pytest.mark.parametrize(
    "held", [{str(one): one for one in range(20_000)}, [(one,) for one in range(20_000)]]
)
def test_a_vocabulary_is_walked_through_once(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    walked = []
    reached = copying._reached
    monkeypatch.setattr(copying, "_reached", lambda *args: walked.append(1) or reached(*args))
    vocabulary = Holder(words=held)
    for _ in range(3):
        assert copied([vocabulary])[0] is vocabulary
    assert len(walked) == 1
    vocabulary.values = torch.ones(1)
    assert (copied(vocabulary) is not vocabulary) == isinstance(held, dict)
    place = id(vocabulary)
    del vocabulary
    assert place not in copying._HANDED_ON


def test_a_chain_of_objects_that_is_too_deep_is_handed_on() -> None:
    chain: Any = None
    for _ in range(600):
        chain = Holder(values=torch.ones(1), next=chain)
    assert copied(chain).values is not chain.values


class PairSet(frozenset[Any]):
    def __new__(cls, one: Any, other: Any) -> PairSet:
        made = super().__new__(cls, (one, other))
        made.name = "pair"  # type: ignore[attr-defined]
        return made


def test_a_set_of_a_class_with_other_arguments_is_copied() -> None:
    pair = PairSet(torch.ones(1), 2)
    made = copied(pair)
    assert type(made) is PairSet
    assert made.name == "pair"
    assert not pair & {one for one in made if isinstance(one, torch.Tensor)}

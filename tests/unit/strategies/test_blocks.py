"""Which modules of a model are its repeated blocks."""

from __future__ import annotations

import pytest
from torch import nn

from paceline.errors import InputError
from paceline.strategies.memory.blocks import find_blocks
from paceline.strategies.structure import Structure
from paceline.tasks.transformer import Transformer


def names(model: nn.Module, blocks: list[str] | None = None) -> list[str]:
    return list(find_blocks(model, Structure(blocks=blocks)))


def test_the_blocks_of_a_transformer() -> None:
    model = Transformer(tokens=9, length=4, width=8, layers=3, heads=2)
    assert names(model) == ["blocks.0", "blocks.1", "blocks.2"]


def test_layers_of_one_class_in_a_sequence_and_not_those_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Embedding(3, 3))
    assert names(model) == ["0", "2"]


def test_the_outermost_repetition_counts() -> None:
    inner = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    assert names(nn.ModuleDict({"stack": nn.ModuleList(inner)})) == ["stack.0", "stack.1"]


def test_one_layer_alone_is_no_repetition_and_a_shared_one_counts_once() -> None:
    assert names(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Embedding(2, 2))) == []
    layer = nn.Linear(2, 2)
    assert names(nn.ModuleList([layer, nn.Linear(2, 2), layer])) == ["0", "1"]


def test_names_and_patterns_of_the_task() -> None:
    model = Transformer(tokens=9, length=4, width=8, layers=3, heads=2)
    assert names(model, ["blocks.*"]) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(model, ["blocks.1", "scores"]) == ["blocks.1", "scores"]
    assert names(model, ["blocks.*.feed_in"]) == [f"blocks.{number}.feed_in" for number in range(3)]


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(InputError, match=r"names 'layers\.\*', but no module .* token, position, blocks"):
        names(Transformer(tokens=9, length=4, width=8, layers=1, heads=2), ["layers.*"])

"""The tensors of a state under keys that no name of the user's can spoil."""

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.state.chunks import MODEL, OPTIMIZER, ChunkBounds, assemble, read_slots, split
from paceline.strategies.sharded import LocalPart

SLOTS = ("exp_avg", "exp/avg", "exp/avg.x", "100%", "%2F", "a%2Fb/c", "")


def state(slots):
    kept = {slot: torch.full((3,), float(place)) for place, slot in enumerate(slots)}
    return {
        MODEL: {"a/b": torch.ones(3), "b": torch.zeros(3)},
        OPTIMIZER: {"state": {"a/b": kept, "b": {"step": 3}}, "groups": []},
    }


def test_whatever_an_optimizer_calls_its_state_comes_back():
    whole = state(SLOTS)
    held = split(whole)
    made = assemble({key: chunk.values for key, chunk in held.chunks.items()}, held.extra_state)
    found = made[OPTIMIZER]["state"]
    assert list(found) == ["a/b", "b"]
    assert {slot: value.tolist() for slot, value in found["a/b"].items()} == {
        slot: [place] * 3 for place, slot in enumerate(SLOTS)
    }
    assert found["b"] == {"step": 3}


def test_a_worker_with_a_part_of_a_parameter_reads_all_its_slots():
    held = split(state(SLOTS))
    catalogue = {key: chunk.meta for key, chunk in held.chunks.items()}
    part = LocalPart(torch.ones(2), ChunkBounds((1,), (2,)), held.chunks["model/a/b"].meta)
    found = read_slots(catalogue, lambda key, bounds: bounds.of(held.chunks[key].values), {"a/b": part})
    assert {slot: value.tolist() for slot, value in found["a/b"].items()} == {
        slot: [place] * 2 for place, slot in enumerate(SLOTS)
    }


def test_a_key_that_is_no_text_is_refused():
    with pytest.raises(CheckpointError, match="keeps of a/b under 7: it is a int, not text"):
        split(state([7]))

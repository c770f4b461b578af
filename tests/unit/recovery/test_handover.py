"""Where the state of a new group comes from: the nearest place that holds all of it."""

import torch

from paceline.recovery.handover import StateInventory, choose, inventory_rows, merge_extra_states
from paceline.recovery.position import Position
from paceline.state.chunks import ChunkBounds, TensorChunk, TensorMeta

FORM = TensorMeta((4, 2), torch.float32)
UPPER, LOWER, ALL = ChunkBounds((0, 0), (2, 2)), ChunkBounds((2, 0), (2, 2)), ChunkBounds.whole((4, 2))
OUTLINE = {"model/weight": True}


def rows(bounds, *, slots=True):
    made = {"model/weight": (FORM, bounds)}
    return made | ({"optimizer/weight/momentum": (FORM, bounds)} if slots else {})


def at(number, bounds=None, **more):
    held = {} if bounds is None else rows(bounds)
    return StateInventory(
        finished=number, position=Position(number=number), outline=OUTLINE, **({"rows": held} | more)
    )


def copied(number, own, neighbours=None):
    return number, (Position(number=number), [rows(own), {} if neighbours is None else rows(neighbours)])


def test_workers_that_hold_everything_between_them_lose_nothing():
    source = choose([at(7, UPPER), at(7, LOWER), at(7, UPPER)])
    assert (source.kind, source.position.number, source.bringers) == ("workers", 7, (0, 1, 2))
    assert source.found.holders["model/weight"] == {UPPER: 0, LOWER: 1}


def test_the_step_that_is_whole_somewhere_wins_over_one_that_is_not():
    # One applied step 8 before the group broke; the other half of that step was lost with its worker.
    source = choose([at(8, UPPER), at(7, LOWER), at(7, UPPER)])
    assert (source.kind, source.position.number, source.bringers) == ("workers", 7, (1, 2))


def test_a_neighbours_copy_fills_in_for_a_lost_part():
    source = choose(
        [
            at(13, UPPER, snapshots=dict([copied(10, UPPER, LOWER)]), checkpoint=5),
            at(13, UPPER, snapshots=dict([copied(10, UPPER)]), checkpoint=5),
        ]
    )
    assert (source.kind, source.position.number) == ("copies", 10)
    assert source.found.holders["model/weight"] == {UPPER: 0, LOWER: 0}


def test_the_furthest_of_copies_and_checkpoint_is_taken():
    offer = at(13, UPPER, snapshots=dict([copied(10, UPPER, LOWER)]), checkpoint=12)
    assert choose([offer]).kind == "checkpoint"
    assert choose([at(13, UPPER, snapshots=dict([copied(12, UPPER, LOWER)]), checkpoint=12)]).kind == "copies"


def test_nothing_whole_is_the_beginning():
    assert choose([at(13, UPPER, snapshots=dict([copied(10, UPPER)]))]).kind == "beginning"


def test_a_worker_that_joins_brings_nothing():
    joins = StateInventory(finished=-1, position=Position(), outline={})
    source = choose([joins, at(3, ALL)])
    assert (source.kind, source.bringers) == ("workers", (1,))


def test_a_tensor_that_only_the_lost_one_knew_is_missed():
    outline = OUTLINE | {"model/bias": True}
    offers = [StateInventory(finished=4, position=Position(number=4), rows=rows(ALL), outline=outline)]
    assert choose(offers).kind == "beginning"


def test_slots_that_only_the_lost_one_kept_are_missed():
    outline = OUTLINE | {"model/bias": True}
    held = rows(ALL) | {"model/bias": (TensorMeta((4,), torch.float32), ChunkBounds.whole((4,)))}
    offers = [StateInventory(finished=4, position=Position(number=4), rows=held, outline=outline)]
    assert choose(offers).kind == "beginning"
    held |= {"optimizer/bias/momentum": (TensorMeta((4,), torch.float32), ChunkBounds.whole((4,)))}
    assert (
        choose([StateInventory(finished=4, position=Position(number=4), rows=held, outline=outline)]).kind
        == "workers"
    )


def test_a_parameter_without_slots_is_whole_where_whoever_answers_for_it_is_left():
    outline = OUTLINE | {"model/bias": True}
    chunks = {
        "model/weight": TensorChunk.whole(torch.ones(4, 2)),
        "model/bias": TensorChunk.whole(torch.ones(4)),
        "optimizer/weight/momentum": TensorChunk.whole(torch.ones(4, 2)),
    }
    half = chunks | {
        "model/bias": TensorChunk(torch.ones(2), ChunkBounds((0,), (2,)), TensorMeta((4,), torch.float32))
    }

    def choice(*held):
        offers = [
            StateInventory(
                finished=4, position=Position(number=4), rows=inventory_rows(*one), outline=outline
            )
            for one in held
        ]
        return choose(offers)

    both = choice((chunks, {"weight", "bias"}))
    assert (both.kind, set(both.found.metas), set(both.found.holders)) == (
        "workers",
        set(chunks),
        set(chunks),
    )
    # With ZeRO all have the model; the slots of the bias were the lost one's to keep.
    assert choice((chunks, {"weight"})).kind == "beginning"
    # Whoever has the whole bias does not answer for it, and the other half of its slots may be lost.
    assert choice((chunks, {"weight"}), (half, {"bias"})).kind == "beginning"


def test_groups_of_parameters_that_each_knows_in_part_become_one():
    def extra_state(name):
        return {
            "optimizer": {"groups": [{"lr": 0.1, "params": [name]}], "state": {name: {"n": 1}}},
            "scaler": None,
        }

    made = merge_extra_states([extra_state("a"), extra_state("b")])
    assert made["optimizer"]["groups"] == [{"lr": 0.1, "params": ["a", "b"]}]
    assert made["optimizer"]["state"] == {"a": {"n": 1}, "b": {"n": 1}}


def test_a_chunk_knows_its_place():
    whole = torch.arange(8.0).view(4, 2)
    assert torch.equal(LOWER.of(whole), whole[2:])
    assert TensorChunk.whole(whole).bounds == ALL


def test_parts_of_two_groups_that_lie_over_each_other_leave_a_gap():
    # Two of twelve rows each have half; four a quarter. One has its new part, one its old, one is new; one was lost.
    whole = TensorMeta((12,), torch.float32)

    def part(start, length):
        return {"model/weight": (whole, ChunkBounds((start,), (length,)))}

    offers = [at(7, rows=part(0, 3)), at(7, rows=part(6, 6)), at(7, rows=part(6, 3))]
    assert choose(offers).kind == "beginning"
    assert choose([*offers, at(7, rows=part(3, 3))]).kind == "workers"
    assert choose([*offers, at(7, rows=part(2, 8))]).kind == "workers"


def test_what_a_departed_worker_left_of_another_tensor_counts_for_nothing():
    other = {"model/weight": (TensorMeta((4, 2), torch.float64), LOWER)}
    source = choose([at(7, UPPER, departing={7: [other]}, checkpoint=5)])
    assert source.kind == "checkpoint"
    assert choose([at(7, UPPER, departing={7: [rows(LOWER)]}, checkpoint=5)]).kind == "workers"

"""Each kind of disagreement is named, with the ranks, before gloo can kill anybody."""

import pytest
import torch

from paceline.errors import CollectiveMismatchError
from tests.workers import run_workers

ONE, TWO = torch.ones(1), torch.ones(2)
MISMATCHES = {
    "operation": (lambda comm: comm.all_gather(ONE), lambda comm: comm.broadcast(ONE), "broadcast"),
    "shape": (lambda comm: comm.all_reduce(ONE), lambda comm: comm.all_reduce(TWO), "float32[2]"),
    "dtype": (lambda comm: comm.all_reduce(ONE), lambda comm: comm.all_reduce(ONE.double()), "float64[1]"),
    "root": (lambda comm: comm.reduce(ONE, root=0), lambda comm: comm.reduce(ONE, root=1), "root 1"),
    "reduce-op": (lambda comm: comm.all_reduce(ONE), lambda comm: comm.all_reduce(ONE, "max"), "max"),
    "barrier": (lambda comm: comm.barrier(), lambda comm: comm.all_reduce_(ONE.clone()), "all_reduce_"),
    "rows": (
        lambda comm: comm.all_to_all([ONE] * 3),
        lambda comm: comm.all_to_all([ONE] * 3, rows=[1] * 3),
        "rows given",
    ),
    "tail": (
        lambda comm: comm.all_to_all([torch.ones(1, 2)] * 3),
        lambda comm: comm.all_to_all([torch.ones(4, 3)] * 3),
        "float32[*, 3]",
    ),
    "split": (lambda comm: comm.split(0), lambda comm: comm.gather(ONE), "gather"),
}


def odd_one_out(world):
    """Rank 1 does something else each time; afterwards the group still works."""
    found = {}
    for kind, (usual, other, _) in MISMATCHES.items():
        with pytest.raises(CollectiveMismatchError) as caught:
            (other if world.rank == 1 else usual)(world.comm)
        found[kind] = str(caught.value)
    assert world.comm.all_reduce(ONE).item() == 3
    return found


def test_each_kind_of_mismatch_is_named_alike_on_every_rank():
    first, *others = run_workers(odd_one_out, 3, checked=True)
    assert others == [first, first]
    for kind, (_, _, words) in MISMATCHES.items():
        header, columns, *rows = first[kind].splitlines()
        assert "disagree about collective" in header, kind
        assert columns.split() == ["rank", "operation", "arguments", "called", "at"]
        assert [row.split()[0] for row in rows] == ["0", "1", "2"]
        assert [words in row for row in rows] == [False, True, False], first[kind]
        assert all("world/test_checked.py:" in row for row in rows)


def wrong_message(world, like):
    with pytest.raises(CollectiveMismatchError) as caught:
        world.comm.send(ONE, to=1) if world.rank == 0 else world.comm.recv(like=like, source=0)
    return str(caught.value)


@pytest.mark.parametrize(("like", "words"), [(TWO, "float32[2]"), (ONE.int(), "int32[1]")])
def test_a_message_that_the_other_does_not_expect(like, words):
    first, second = run_workers(wrong_message, 2, like, checked=True)
    assert first == second
    assert "rank 0 sends what rank 1 does not expect" in first
    assert words in first


def inside_a_part(world):
    part = world.comm.split(0 if world.rank else 1)
    if world.rank == 0:
        return None
    with pytest.raises(CollectiveMismatchError) as caught:
        part.all_reduce(ONE if part.rank == 0 else TWO)
    return str(caught.value)


def test_the_parts_are_checked_too():
    nothing, first, second = run_workers(inside_a_part, 3, checked=True)
    assert nothing is None
    assert first == second
    assert "collective 1" in first

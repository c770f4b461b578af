"""What machines tell each other, also where it is nonsense, and what of it must agree."""

import json
from dataclasses import replace

import pytest

from paceline.doctor.card import KIND, Card, compare
from paceline.doctor.finding import Level


def test_a_card_comes_through_as_it_was():
    mine = Card.mine("one", 4000)
    assert Card.read(mine.packed()) == mine


@pytest.mark.parametrize(
    "change",
    [{"kind": "other"}, {"port": 70_000}, {"port": "80"}, {"clock": None}, {"versions": [1]}, {"name": 3}],
)
def test_what_is_no_card_is_none(change):
    told = json.loads(Card.mine("one").packed())
    assert told["kind"] == KIND
    assert Card.read(json.dumps({**told, **change}).encode()) is None


@pytest.mark.parametrize("line", [b"", b"\xff\xfe", b"[]", b"{}", b"HTTP/1.1 400 Bad Request", b"1e999"])
def test_a_strange_line_is_none(line):
    assert Card.read(line) is None


def test_equal_machines_have_nothing_to_say():
    mine = Card.mine("one")
    assert compare(mine, replace(mine, identifier="two"), "there", 0.4) == []


def test_another_torch_is_a_fault_and_another_numpy_worth_a_look():
    mine = Card.mine("one")
    theirs = replace(mine, versions={**mine.versions, "torch": "1.0", "numpy": "1.0"})
    found = {one.what: one.level for one in compare(mine, theirs, "there", 0.0)}
    assert found == {
        f"numpy is {mine.versions['numpy']} here and 1.0 on there": Level.WARN,
        f"torch is {mine.versions['torch']} here and 1.0 on there": Level.FAIL,
    }


@pytest.mark.parametrize(("ahead", "words"), [(90.0, "1 min 30 s ahead of"), (-3.0, "3.0 s behind")])
def test_clocks_that_differ_are_worth_a_look(ahead, words):
    mine = Card.mine("one")
    (found,) = compare(mine, mine, "there", ahead)
    assert (found.check, found.level) == ("clock", Level.WARN)
    assert f"the clock of there is {words} this one" in found.what

"""The tour on real workers, as seen from every rank."""

import json
import re

import pytest
from rich.console import Console

from paceline.cli.collectives import render
from paceline.cli.tour import STOPS, tour
from paceline.errors import InputError, UnknownNameError
from paceline.world import alone
from tests.workers import run_workers


@pytest.fixture(scope="module")
def seen():
    first, *others = run_workers(tour, 4)
    assert others == [first] * 3
    return json.loads(json.dumps(first))


def test_every_operation_shows_what_it_does(seen):
    after = {operation["name"]: operation["after"] for operation in seen["operations"]}
    assert list(after) == list(STOPS)
    assert after["broadcast"] == [[0, 1]] * 4
    assert after["scatter"] == [[0], [1], [2], [3]]
    assert after["gather"] == [[0, 1, 10, 11, 20, 21, 30, 31], None, None, None]
    assert after["reduce"] == [[60, 64], None, None, None]
    assert after["all_reduce"] == [[60, 64]] * 4
    assert after["all_gather"] == [[0, 1, 10, 11, 20, 21, 30, 31]] * 4
    assert after["reduce_scatter"] == [[60], [64], [68], [72]]
    assert after["all_to_all"] == [[place, 10 + place, 20 + place, 30 + place] for place in range(4)]
    assert after["send_recv"] == [[30, 31], [0, 1], [10, 11], [20, 21]]
    assert after["split"] == [[20, 22], [40, 42], [20, 22], [40, 42]]
    assert all(re.fullmatch(r"waited \d+ ms", text) for text in after["barrier"])


def test_the_tables_fit_80_columns(seen):
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(render(seen))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert max(map(len, lines)) <= 80
    assert ["3", "30", "31", "60", "64"] in [line.split() for line in lines]


def some(world):
    return [operation["name"] for operation in tour(world, ["all_reduce", "broadcast"])["operations"]]


def test_only_some():
    assert run_workers(some, 2) == [["broadcast", "all_reduce"]] * 2


def test_wrong_requests_are_refused():
    with pytest.raises(UnknownNameError, match="'all_reduce'"):
        tour(alone(), ["all_reduc"])
    with pytest.raises(InputError, match="--workers 2"):
        tour(alone())

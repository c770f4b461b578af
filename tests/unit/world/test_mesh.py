"""The grid of workers, and how a strategy on the command line becomes one."""

from itertools import product

import pytest

from paceline import strategies
from paceline.errors import InputError
from paceline.world.mesh import DATA, SIDES, Mesh


def test_every_rank_has_one_place_and_every_place_one_rank():
    mesh = Mesh.of({"tp": 2, "pp": 3, "fsdp": 2, "ddp": 2})
    assert mesh.workers == 24
    assert [side for side, _ in mesh.sizes] == list(SIDES)
    places = [tuple(mesh.coordinate(rank).values()) for rank in range(24)]
    assert places == list(product(range(3), range(2), range(2), range(2)))


def test_groups_along_a_side_are_disjoint_and_cover_everybody():
    mesh = Mesh.of({"pp": 2, "ddp": 3, "tp": 2})
    for sides in (("pp",), ("ddp",), ("tp",), ("pp", "tp"), DATA, SIDES):
        groups = {mesh.group(rank, *sides): mesh.members(rank, *sides) for rank in range(12)}
        assert sorted(rank for members in groups.values() for rank in members) == list(range(12))
        for rank in range(12):
            members = groups[mesh.group(rank, *sides)]
            assert members.index(rank) == mesh.index(rank, *sides)
            assert len(members) == mesh.size(*sides)


def test_one_of_those_who_see_the_same_samples_answers_for_them():
    mesh = Mesh.of({"pp": 2, "ddp": 2, "tp": 2})
    leads = [rank for rank in range(8) if mesh.leads(rank, "tp", "pp")]
    assert [mesh.index(rank, *DATA) for rank in leads] == [0, 1]


@pytest.mark.parametrize(
    ("text", "workers", "mesh", "name"),
    [
        ("ddp", 3, "ddp=3", "ddp"),
        ("fsdp", 3, "fsdp=3", "fsdp"),
        ("fsdp=2,ddp=2", 4, "ddp=2,fsdp=2", "fsdp"),
        ("tp=2,ddp", 6, "ddp=3,tp=2", "tp"),
        (" fsdp = 2 , pp = 2 ", 4, "pp=2,fsdp=2", "pp"),
        ("local-sgd", 2, "ddp=2", "local-sgd"),
        ("single", 1, "ddp=1", "single"),
    ],
)
def test_what_the_command_line_says(text, workers, mesh, name):
    chosen = strategies.choice(text)
    assert (str(chosen.mesh(workers)), chosen.name) == (mesh, name)
    assert str(chosen.pinned(workers).fitted(workers)) == mesh


@pytest.mark.parametrize(
    ("text", "workers", "message"),
    [
        (
            "ddp=2,tp=3",
            4,
            r"ddp=2,tp=3 needs 6 workers, but 4 were given\. Use --workers 6 or --strategy ddp=2,tp=2\.",
        ),
        (
            "ddp=2,fsdp=2",
            6,
            r"needs 4 workers, but 6 were given\. Use .*--strategy ddp=3,fsdp=2 or --strategy ddp=2,fsdp=3",
        ),
        ("fsdp,tp=2", 3, "needs 2 times some workers, but 3 were given"),
        ("pp=2,tp=2", 4, "pp cannot stand beside tp"),
        ("ddp,fsdp", 4, "leaves more than one size open"),
        ("ddp=2,ddp=2", 4, "names ddp twice"),
        ("tp=0", 4, "tp with 0 workers"),
        ("dpp=2", 2, "unknown strategy 'dpp=2'"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_numbers(text, workers, message):
    with pytest.raises(InputError, match=message):
        strategies.choice(text).mesh(workers)


@pytest.mark.parametrize(
    ("text", "began", "left", "mesh", "name"),
    [
        ("ddp", 3, 2, "ddp=2", "ddp"),
        ("fsdp", 4, 3, "fsdp=3", "fsdp"),
        ("ddp=2,fsdp=2", 4, 3, "fsdp=3", "fsdp"),
        ("ddp=2,fsdp=2", 4, 2, "ddp=1,fsdp=2", "fsdp"),
        ("ddp=2,tp=2", 4, 2, "ddp=1,tp=2", "tp"),
        ("ddp=2,tp=2", 4, 3, "ddp=1,tp=2", "tp"),
        ("ddp=3,pp=2", 6, 5, "pp=2,ddp=2", "pp"),
        ("pp", 4, 3, "pp=3", "pp"),
        ("tp", 2, 1, "ddp=1", "ddp"),
        ("fsdp=2,pp=2", 4, 3, "pp=2,fsdp=1", "pp"),
        ("local-sgd", 3, 2, "ddp=2", "local-sgd"),
    ],
)
def test_those_who_are_left_make_the_mesh_that_is_nearest(text, began, left, mesh, name):
    chosen = strategies.choice(text).pinned(began)
    fitted = chosen.fitted(left)
    # Some are left over where several share one replica, and only there.
    assert fitted.workers == left or (fitted.workers == left - 1 and ("tp" in text or "pp" in text))
    assert (str(fitted), chosen.strategy(fitted)) == (mesh, name)


def test_a_list_of_strategies_keeps_a_mesh_together():
    assert strategies.several("ddp, fsdp=2,ddp=2,tp,dp") == ("ddp", "fsdp=2,ddp=2", "tp", "dp")

"""Roles, and the names of their workers."""

import subprocess
import sys

import pytest

from paceline.errors import InputError, UnknownNameError
from paceline.remote.names import Roles
from paceline.remote.roles import Role
from tests.patience import HANG_S


def test_ranks_count_through_the_roles_in_their_order():
    roles = Roles.parse("trainers=2, servers=1,agent=1")
    assert roles.names == ("trainer:0", "trainer:1", "server:0", "agent:0")
    assert roles.size == 4
    assert [roles.role(rank) for rank in range(4)] == ["trainers", "trainers", "servers", "agent"]
    assert [roles.index(rank) for rank in range(4)] == [0, 0, 1, 2]
    assert str(roles) == "trainers=2,servers=1,agent=1"


def test_what_is_written_is_read_back():
    roles = Roles.of({"trainers": 3, "parameter_servers": 2})
    assert Roles.parse(str(roles)) == roles
    assert roles.workers("parameter_server") == ("parameter_server:0", "parameter_server:1")


@pytest.mark.parametrize("name", ["server:1", "servers:1"])
def test_a_worker_is_known_by_the_name_of_one_or_of_several(name):
    assert Roles.parse("trainers=1,servers=2").resolve(name) == "server:1"


def test_the_only_worker_of_a_role_needs_no_number():
    roles = Roles.parse("trainers=2,servers=1")
    assert roles.resolve("server") == "server:0"
    with pytest.raises(UnknownNameError, match="unknown worker 'trainer'"):
        roles.resolve("trainer")


def test_names_that_are_not_there():
    roles = Roles.parse("trainers=2,servers=1")
    with pytest.raises(UnknownNameError, match="Did you mean 'servers'"):
        roles.workers("severs")
    with pytest.raises(UnknownNameError, match="unknown worker 'server:1'"):
        roles.resolve("server:1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no role"),
        ("trainers", "is no role"),
        ("trainers=two", "is no role"),
        ("trainers=-1", "is no role"),
        ("trainers=1,trainers=2", "trainers is named twice"),
        ("trainers=0", "role trainers is 0"),
        ("Trainers=1", "no name for a role"),
        ("=1", "no name for a role"),
        ("server=1,servers=1", "would have the same name"),
    ],
)
def test_roles_that_cannot_be(text, words):
    with pytest.raises(InputError, match=words) as caught:
        Roles.parse(text)
    assert "\n" not in str(caught.value)


def test_a_role_is_checked_when_it_is_made():
    with pytest.raises(InputError, match="a role runs a function, not 3"):
        Role(3)
    with pytest.raises(InputError, match="a number of workers, not '2'"):
        Role(workers="2")
    with pytest.raises(InputError, match="takes no arguments"):
        Role(args=(1,))


def test_roles_are_read_without_torch():
    check = "import sys, paceline.launch.roles, paceline.remote; paceline.remote.Roles; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=HANG_S, check=False).returncode == 0

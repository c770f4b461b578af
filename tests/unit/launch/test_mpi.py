"""Worlds of MPI that need no MPI library: what their launchers say is enough."""

import os
from pathlib import Path

import pytest

from paceline.launch.api import choose
from paceline.launch.clusters import mpi
from paceline.world import env
from paceline.world.mpi import library

STARTED = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.fixture
def variables(monkeypatch):
    """Give an environment of the test's own."""
    monkeypatch.setattr(os, "environ", {})
    return os.environ


def test_ranks_meet_at_the_master_that_they_were_told(variables):
    variables.update(STARTED, MASTER_ADDR="10.0.0.7", MASTER_PORT="29500")
    mpi.enter()
    assert env.identity() == env.Identity(
        rank=3,
        size=4,
        local_rank=1,
        local_size=2,
        node_rank=1,
        nodes=2,
        master_address="10.0.0.7",
        master_port=29500,
    )
    assert choose().name == "mpi"


def test_what_another_launcher_has_said_stays(variables):
    variables.update(STARTED, RANK="0", WORLD_SIZE="1")
    mpi.enter()
    found = env.identity()
    assert found is not None
    assert (found.rank, found.size) == (0, 1)


def test_a_process_that_nobody_started_is_left_alone(variables):
    mpi.enter()
    assert env.identity() is None
    assert choose().name == "local"


MAPS = """7f0-7f1 rw-s 00000000 00:1a 1190 /dev/shm/mpich_shm_a b
7f1-7f2 rw-s 00000000 00:1a 1190 /dev/shm/mpich_shm_a b
7f2-7f3 rw-s 00000000 00:1a 1191 /dev/shm/mpich_shm_c (deleted)
7f3-7f4 rw-p 00000000 00:00 0
7f4-7f5 r-xp 00000000 08:01 2 /usr/lib/libmpi.so
"""


def test_shared_memory_that_still_has_a_name():
    assert library._shared_memory(MAPS) == {Path(f"{library._SHARED_MEMORY}a b")}

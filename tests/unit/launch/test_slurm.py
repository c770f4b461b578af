"""Worlds of SLURM that need no SLURM: what `srun` says is enough."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.errors import InputError
from paceline.launch.api import choose
from paceline.launch.clusters import slurm
from paceline.transport.runtime_folder import RuntimeFolder
from paceline.transport.store_server import StoreServer
from paceline.world import env, join

STARTED = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "localhost,gpu[02-04]",
    "PACELINE_SECRET": "0123456789abcdef0123456789abcdef",
}


@pytest.fixture
def variables(monkeypatch):
    """Give an environment of the test's own, in a process that is not to say goodbye to anybody."""
    monkeypatch.setattr("atexit.register", lambda *_: None)
    monkeypatch.setattr(os, "environ", {})
    return os.environ


def test_a_task_of_several_nodes_meets_the_others_at_the_first(variables):
    variables.update(STARTED)
    slurm.enter()
    port = slurm.port_of(4711, 2)
    assert env.identity() == env.Identity(
        rank=5,
        size=7,
        local_rank=1,
        local_size=2,
        node_rank=2,
        nodes=4,
        master_address="localhost",
        master_port=port,
        store=f"tcp://localhost:{port + 1}",
    )
    assert choose().name == "slurm"


def test_several_nodes_without_a_secret_are_refused(variables):
    variables.update(STARTED)
    del variables["PACELINE_SECRET"]
    with pytest.raises(InputError, match=r"4 nodes and share no secret.*export PACELINE_SECRET="):
        slurm.enter()
    assert env.identity() is None


def test_what_another_launcher_has_said_stays(variables):
    variables.update(STARTED, RANK="0", WORLD_SIZE="1")
    slurm.enter()
    found = env.identity()
    assert found is not None
    assert (found.rank, found.size) == (0, 1)


@pytest.mark.parametrize("without", ["SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"])
def test_a_batch_script_is_no_task(without, variables):
    variables.update(STARTED)
    del variables[without]
    slurm.enter()
    assert env.identity() is None
    assert choose().name == "local"


def test_a_step_of_one_task_makes_its_own_workers(variables):
    variables.update(STARTED, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1")
    assert env.slurm_task() is None


@pytest.mark.parametrize(
    ("arguments", "joins"),
    [
        (["train", "digits"], True),
        (["train", "digits", "--rendezvous", "gpu02:29400"], False),
        (["train", "digits", "--rendezvous=gpu02:29400"], False),
        (["train", "digits", "--on", "local"], False),
        (["train", "digits", "--on=local"], False),
        (["run", "-n", "2", "script.py"], False),
    ],
)
def test_launchers_that_meet_by_themselves_are_no_workers(arguments, joins, variables):
    variables.update(STARTED)
    assert main._is_task(arguments) == joins


@pytest.mark.parametrize("how", [["--config", "c.toml"], ["--config=c.toml"]], ids=" ".join)
def test_a_file_of_options_may_say_that_they_meet_by_themselves(how, variables, tmp_path, monkeypatch):
    variables.update(STARTED)
    monkeypatch.chdir(tmp_path)
    assert main._is_task(["train", "digits", *how])  # there is none, which the command itself says
    (tmp_path / "c.toml").write_text("workers = 2")
    assert main._is_task(["train", "digits", *how])
    (tmp_path / "c.toml").write_text('rendezvous = "gpu02:29400"')
    assert not main._is_task(["train", "digits", *how])


@pytest.mark.parametrize(
    ("written", "first"),
    [
        ("vm", "vm"),
        ("node[01-03,7],login", "node01"),
        ("gpu-a[3,5]-ib,node1", "gpu-a3-ib"),
        ("rack[1-2]node[10-12]", "rack1node10"),
        ("a,b", "a"),
    ],
)
def test_the_first_node_of_a_list(written, first):
    assert slurm.first_node(written) == first


def test_the_tasks_of_a_node():
    assert [slurm.tasks_on("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    assert slurm.tasks_on("8", 0) == 8
    for wrong in ("", "two", "2(x"):
        with pytest.raises(InputError, match="no list of numbers"):
            slurm.tasks_on(wrong, 0)
    with pytest.raises(InputError, match="SLURM_NODEID is 4"):
        slurm.tasks_on("2(x3),1", 4)


def test_steps_have_ports_that_linux_does_not_hand_out():
    ports = {slurm.port_of(job, step) for job in range(4000, 4100) for step in range(3)}
    assert len(ports) > 150
    assert min(ports) >= 15000
    assert max(ports) + 1 < 32768


@pytest.fixture
def temporary(monkeypatch):
    """A folder for temporary files whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr("tempfile.gettempdir", lambda: folder)
        yield Path(folder)


def test_a_shared_folder_goes_with_the_last_who_has_it(temporary):
    first, second = RuntimeFolder("slurm-1-0"), RuntimeFolder("slurm-1-0")
    assert first.path == second.path
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    RuntimeFolder().close()  # which deletes what nobody holds
    assert first.path.is_dir()
    first.close()
    assert second.path.is_dir()
    second.close()
    assert list(temporary.iterdir()) == []


def test_a_shared_folder_that_others_may_enter_is_refused(temporary):
    (temporary / "paceline-run-slurm-1-0").mkdir(mode=0o755)
    with pytest.raises(InputError, match="not a folder of this user's alone"):
        RuntimeFolder("slurm-1-0")


def test_a_store_that_is_gone_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "GOODBYE_S", 0.1)
    address = f"ipc://{tmp_path}/store"
    server = StoreServer(address)
    assert join.run_store(address).add(slurm.LEFT, 1) == 1
    slurm._wait_for_others(address, 1)
    server.close()
    try:
        slurm._wait_for_others(address, 2)  # raises nothing
    finally:
        join.run_store.cache_clear()

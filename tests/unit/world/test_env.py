import pytest

from paceline.errors import InputError
from paceline.world import env

NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)


@pytest.fixture
def clean(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


def test_nobody_launched_us(clean):
    assert env.identity() is None


def test_what_torchrun_sets(clean):
    clean(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, GROUP_RANK=1, GROUP_WORLD_SIZE=2)
    clean(MASTER_ADDR="10.0.0.7", MASTER_PORT=29501, TORCHELASTIC_RUN_ID="none")
    assert env.identity() == env.Identity(
        rank=5,
        size=8,
        local_rank=1,
        local_size=4,
        node_rank=1,
        nodes=2,
        master_address="10.0.0.7",
        master_port=29501,
    )


def test_a_bare_rank_and_size_mean_one_node(clean):
    clean(RANK=2, WORLD_SIZE=3)
    found = env.identity()
    assert (found.local_rank, found.local_size, found.node_rank, found.nodes) == (2, 3, 0, 1)
    assert (found.master_address, found.master_port) == ("127.0.0.1", 0)


def test_nodes_follow_from_the_local_size(clean):
    clean(RANK=5, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4)
    found = env.identity()
    assert (found.local_rank, found.node_rank, found.nodes) == (1, 1, 2)


def test_node_rank_is_another_name_for_group_rank(clean):
    clean(RANK=1, WORLD_SIZE=4, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, NODE_RANK=3)
    assert env.identity().node_rank == 3


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "two", "WORLD_SIZE": 3}, "RANK is 'two'"),
        ({"RANK": 1}, "WORLD_SIZE is not"),
        ({"RANK": 0, "WORLD_SIZE": "1_0"}, "WORLD_SIZE is '1_0'"),
        ({"WORLD_SIZE": 2}, "RANK is not"),
        ({"RANK": 3, "WORLD_SIZE": 3}, "RANK is 3 but WORLD_SIZE is 3"),
        ({"RANK": -1, "WORLD_SIZE": 3}, "from 0 to 2"),
        ({"RANK": 0, "WORLD_SIZE": 0}, "at least one worker"),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 2}, "LOCAL_RANK is 2"),
        ({"RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": 99999}, "MASTER_PORT is 99999"),
        ({"RANK": 0, "WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 0}, "GROUP_WORLD_SIZE is 0"),
    ],
)
def test_malformed_variables_are_named(clean, variables, words):
    clean(**variables)
    with pytest.raises(InputError, match=words):
        env.identity()


def test_export_read_and_snapshot(monkeypatch):
    monkeypatch.setenv("PACELINE_TEST", "before")
    before = env.snapshot()
    env.export({"PACELINE_TEST": "after"})
    assert env.read("PACELINE_TEST") == "after"
    assert before["PACELINE_TEST"] == "before"
    assert env.read("PACELINE_TEST_NOT_SET") is None


def test_what_a_worker_is_told_is_what_it_reads(clean, monkeypatch):
    told = env.Identity(rank=3, size=4, local_rank=1, local_size=2, node_rank=1, nodes=2, master_port=29500)
    clean(**told.variables())
    assert env.identity() == told


@pytest.mark.parametrize(
    "names",
    [
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ],
    ids=["mpich", "open-mpi"],
)
def test_what_launchers_of_mpi_set(clean, names):
    assert env.mpi_rank() is None
    clean(**dict(zip(names, (5, 8, 1, 4), strict=True)))
    assert env.mpi_rank() == (5, 8, 1, 4)
    assert env.identity() is None


SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("rank", "size", "is_slurms"),
    [("1", "2", True), ("3", "8", False), ("1", "8", False)],
    ids=["of srun itself", "of mpirun in a job", "of mpirun, on the second node"],
)
def test_whose_the_variables_of_mpi_are_in_a_job_of_slurms(clean, rank, size, is_slurms):
    clean(**SRUN, PMI_RANK=rank, PMI_SIZE=size)
    assert (env.mpi_rank() is None) == is_slurms
    assert (env.slurm_task() is not None) == is_slurms


def test_one_rank_of_mpirun_per_node_of_a_job_is_no_task_of_sruns(clean):
    """Hydra reaches each node by a task of srun's, so both number them alike; only Hydra says how many ranks are on a node."""
    clean(**SRUN, PMI_RANK="1", PMI_SIZE="2", MPI_LOCALRANKID="0", MPI_LOCALNRANKS="1")
    assert env.mpi_rank() == (1, 2, 0, 1)
    assert env.slurm_task() is None


def test_a_step_of_one_task_is_no_world_of_mpis(clean):
    clean(**SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, PMI_RANK="0", PMI_SIZE="1")
    assert env.mpi_rank() is None
    assert env.slurm_task() is None


def test_the_store_of_a_run_is_not_that_of_a_torchrun_inside_it(clean):
    made = env.Identity(rank=0, size=2, local_rank=0, local_size=2, master_port=4000, store="tcp://h:1")
    clean(**{**made.variables(), "TORCHELASTIC_RUN_ID": "a name of the user's"})
    assert env.identity() == made
    clean(MASTER_PORT=4001)
    assert env.identity().store == ""

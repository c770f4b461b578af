"""`paceline run`: any script that torchrun could start."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.workers import fork_server as forkserver
from tests.dist.launch.processes import PACELINE, started
from tests.patience import HANG_S

TELL = """
import json, os, pathlib, sys
import beside
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
         "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
         "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS"]
told = {name: os.environ.get(name) for name in names}
told |= {"argv": sys.argv, "file": __file__, "name": __name__, "main": sys.modules["__main__"].__name__}
pathlib.Path(f"told-{os.environ['RANK']}.json").write_text(json.dumps(told))
print("out of rank", os.environ["RANK"])
print("err of rank", os.environ["RANK"], file=sys.stderr)
"""

PLAIN_DDP = """
import sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.full((4, 2), float(dist.get_rank()))).sum().backward()
optimizer.step()
print("gradient", model.module.weight.grad.tolist(), "compiler", hasattr(sys.modules["torch._dynamo"], "__file__"))
dist.destroy_process_group()
"""

FAIL = """
import os, sys, time
print("so far so good")
if os.environ["RANK"] == "1":
    raise ValueError("the reason")
time.sleep(60)
"""

GONE = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    sys.exit()
dist.all_reduce(torch.ones(1))
"""

RANK_OF_MPI = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
TASK_OF_SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(("launcher", "variables"), [("mpirun", RANK_OF_MPI), ("srun", TASK_OF_SLURM)])
def test_one_of_several_that_another_launcher_has_started_is_refused(
    command, folder, monkeypatch, launcher, variables
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (folder / "script.py").write_text("print('ran')")
    ended = command("run", "script.py")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"error: {launcher} has started this command 4 times")
    assert f"{launcher} -n 4 python script.py" in ended.err
    assert ended.err.count("\n") == 1
    assert list(folder.iterdir()) == [folder / "script.py"]


def told(folder, rank):
    return json.loads((folder / f"told-{rank}.json").read_text())


def test_a_script_finds_what_torchrun_would_have_told_it(command, folder):
    (folder / "scripts").mkdir()
    (folder / "scripts" / "tell.py").write_text(TELL)
    (folder / "scripts" / "beside.py").touch()
    ended = command(
        "run", "-n", 2, "--out", "run", "scripts/tell.py", "--its-own", "x", "-n", "7", "--out", "y"
    )
    assert (ended.status, ended.out, ended.err) == (0, "out of rank 0\n", "err of rank 0\n")
    first, second = told(folder, 0), told(folder, 1)
    assert int(first["MASTER_PORT"]) > 0
    for rank, one in enumerate((first, second)):
        assert one == {
            **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")},
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), "2"),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": first["MASTER_PORT"],
            "TORCHELASTIC_RUN_ID": "paceline",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "OMP_NUM_THREADS": one["OMP_NUM_THREADS"],
            "argv": ["scripts/tell.py", "--its-own", "x", "-n", "7", "--out", "y"],
            "file": str(folder / "scripts" / "tell.py"),
            "name": "__main__",
            "main": "__main__",
        }
        log = (folder / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert sorted(log.splitlines()) == [f"err of rank {rank}", f"out of rank {rank}"]
    roster = json.loads((folder / "run" / "workers.json").read_text())
    assert [(worker["rank"], worker["host"], worker["generation"]) for worker in roster] == [
        (0, socket.gethostname(), 0),
        (1, socket.gethostname(), 0),
    ]


def test_the_installed_command_runs_a_module_of_the_folder_one_is_in(folder):
    """The entry point's own sys.path does not hold the current folder, other than `python -m paceline`."""
    (folder / "package").mkdir()
    (folder / "package" / "tell.py").write_text(TELL)
    (folder / "beside.py").touch()
    entry = str(Path(sys.executable).with_name("paceline"))
    ended = subprocess.run(
        [entry, "run", "--nproc-per-node", "1", "-m", "package.tell", "-m", "x"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "out of rank 0\n"), ended.stderr
    assert told(folder, 0)["argv"] == [str(folder / "package" / "tell.py"), "-m", "x"]
    assert len(list(folder.glob("runs/package-tell-*/logs/rank-0.log"))) == 1


def test_a_plain_ddp_script_runs_without_loading_the_compiler(command, folder):
    (folder / "plain.py").write_text(PLAIN_DDP)
    forkserver.shared().close()  # another test may have had it load more
    ended = command("run", "-n", 2, "plain.py")
    assert (ended.status, ended.out) == (0, "gradient [[2.0, 2.0]] compiler False\n"), ended.err


def test_the_traceback_of_the_rank_that_failed_comes_last(command, folder):
    (folder / "fail.py").write_text(FAIL)
    ended = command("run", "-n", 2, "--out", "run", "fail.py")
    assert (ended.status, ended.out) == (1, "so far so good\n")
    lines = ended.err.splitlines()
    begin = lines.index(f"rank 1 on {socket.gethostname()} failed:")
    assert lines[begin + 1] == "Traceback (most recent call last):"
    assert lines[begin + 2] == f'  File "{folder / "fail.py"}", line 5, in <module>'
    assert lines[-1] == "ValueError: the reason"
    assert "ValueError: the reason" in (folder / "run" / "logs" / "rank-1.log").read_text()


def test_a_rank_that_had_ended_well_is_named_behind_the_traceback_of_one_that_waits_for_it(command, folder):
    (folder / "gone.py").write_text(GONE)
    ended = command("run", "-n", 2, "gone.py")
    assert ended.status == 1
    assert "rank 0 on " in ended.err
    assert re.fullmatch(r"rank 1 had ended with status 0, \d+\.\d s before\.", ended.err.splitlines()[-1])


def test_an_exit_status_of_a_script_is_reported(command, folder):
    (folder / "leave.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    assert command("run", "-n", 2, "leave.py", "0").status == 0
    ended = command("run", "-n", 2, "leave.py", "3")
    assert ended.status == 1
    assert ended.err.splitlines()[-1].endswith(" exited with status 3.")


def test_a_reader_that_goes_away_ends_the_run_quietly(folder):
    (folder / "talk.py").write_text("while True: print('again')")
    with started(*PACELINE, "run", "-n", "1", "talk.py", folder=folder) as command:
        assert command.process.stdout.readline() == "again\n"
        command.process.stdout.close()
        assert command.process.wait(timeout=HANG_S) == 1
        assert command.process.stderr.read() == ""
        assert command.left() == {}


OWN_RPC = """
import os
import torch
from torch.distributed import rpc

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    print(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist())
rpc.shutdown()
"""


def test_a_script_that_uses_torchs_own_rpc(command, folder):
    (folder / "own_rpc.py").write_text(OWN_RPC)
    ended = command("run", "-n", 2, "own_rpc.py")
    assert (ended.status, ended.out) == (0, "[2.0, 2.0]\n")

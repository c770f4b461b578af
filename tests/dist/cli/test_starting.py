"""`--on` and `--hosts`: what would be started, word for word, and what is refused."""

import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.starting import start_elsewhere
from paceline.compat import python
from paceline.errors import InputError
from paceline.launch.nodes import machines
from paceline.launch.nodes.rendezvous import Rendezvous
from paceline.training.options import RunOptions
from paceline.transport.secret import Secret
from tests.patience import HANG_S

TORCHRUN = f"{sys.executable} -m torch.distributed.run --nproc-per-node=2"
TRAIN = ("train", "digits", "--workers", 2, "--dry-run")
MPIEXEC = Path(sys.executable).with_name("mpiexec")


def test_torchrun_on_this_machine(command, folder):
    ended = command(*TRAIN, "--on", "torchrun", "--shards=4")
    assert ended.status == 0, ended.err
    assert ended.out == f"{TORCHRUN} --standalone -m paceline train digits --workers 2 --shards=4\n"


def test_torchrun_on_each_machine(command, folder):
    ended = command(*TRAIN, "--on=torchrun", "--nodes", 2, "--rendezvous", "10.77.0.9:29411", "--out", "run")
    rest = "--master-addr=10.77.0.9 --master-port=29411 -m paceline train digits --workers 2 --out run"
    assert ended.out.splitlines() == [
        f"on 10.77.0.9: {TORCHRUN} --nnodes=2 --node-rank=0 {rest}",
        f"on machine 1: {TORCHRUN} --nnodes=2 --node-rank=1 {rest}",
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists(),
    reason="the extra mpi (mpi4py and mpich) is not installed here",
)
@pytest.mark.parametrize("how", [("--on", "mpi"), ("--backend", "mpi")], ids=" ".join)
def test_mpi(command, folder, how):
    ended = command(*TRAIN, *how)
    assert (
        ended.out == f"{MPIEXEC} -n 2 {sys.executable} -m paceline train digits --workers 2 {' '.join(how)}\n"
    )


def test_machines_over_ssh(command, folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/some where")
    monkeypatch.setenv("PACELINE_SECRET", "nobody is to see this one")
    ended = command(*TRAIN, "--hosts", "me@10.77.0.8,localhost", "--ssh", "ssh -p 2222", "--out", "run")
    assert ended.status == 0, ended.err
    run = f"{sys.executable} -m paceline.cli.remote_end train digits --workers 2"
    meet = "--nodes=2 --rendezvous=10.77.0.8:29400 --out=run"
    there = f"cd {folder} && exec env 'PYTHONPATH=/some where' {run} {meet} --lead"
    options = "-T -oBatchMode=yes -oConnectTimeout=20 -oServerAliveInterval=15"
    assert ended.out.splitlines() == [
        f"me@10.77.0.8: ssh -p 2222 {options} me@10.77.0.8 {shlex.quote(there)}",
        f"localhost: {run} {meet}",
    ]


def test_a_run_that_is_resumed_may_have_other_machines(command, folder):
    had = {"strategy": "ddp", "workers": 2, "shards": 6, "nodes": "3", "rendezvous": "10.77.0.7:29411"}
    spec = {"task": "paceline.tasks.digits:Digits", "name": "digits", "options": had}
    (folder / "run").mkdir()
    (folder / "run" / "spec.json").write_text(json.dumps(spec))
    ended = command("train", "--resume", "--out", "run", "--hosts", "me@10.77.0.8,me@10.77.0.9", "--dry-run")
    assert ended.status == 0, ended.err
    meet = "train --resume --nodes=2 --rendezvous=10.77.0.8:29400 --out=run"
    assert [meet in line for line in ended.out.splitlines()] == [True, True]


DECIDED = "--rendezvous=LEADER:PORT --out=mine --secret-file="


@pytest.mark.parametrize(
    ("how", "each"),
    [
        (["--on", "ray", "--nodes=2"], [f"--nodes=2 {DECIDED} --lead", f"--nodes=2 {DECIDED} --no-lead"]),
        (["--on", "ray", "--nodes=1"], [f"--nodes=1 {DECIDED} --lead"]),
        (
            ["--hosts", "me@10.77.0.8,me@10.77.0.9", "--nodes=2", "--rendezvous=LEADER:PORT"],
            [f"--nodes=2 {DECIDED} --lead", f"--nodes=2 {DECIDED} --no-lead"],
        ),
    ],
    ids=["ray", "one node of ray's", "ssh"],
)
def test_what_is_decided_here_counts_there_against_a_file_of_options(command, folder, how, each):
    file = {"nodes": 3, "rendezvous": "10.77.0.7:1", "out": "theirs", "secret_file": "key", "lead": True}
    Path("c.toml").write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in file.items()))
    ended = command("train", "--config=c.toml", *how, "--out", "mine", "--dry-run", "--", "digits")
    assert ended.status == 0, ended.err
    words = [f"train --config=c.toml {decided} -- digits" for decided in each]
    assert [line.partition("remote_end ")[2].rstrip("'") for line in ended.out.splitlines()] == words


def test_an_empty_secret_file_is_that_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_SECRET", "the launcher has sent this one")
    found, _ = machines.shared_secret(Rendezvous.parse("127.0.0.1:29400", "2"), "")
    assert found == Secret("the launcher has sent this one")


def test_a_resumed_run_of_rays_meets_elsewhere(command, folder):
    had = {"strategy": "ddp", "workers": 2, "shards": 6, "nodes": "3", "rendezvous": "10.77.0.7:29411"}
    spec = {"task": "paceline.tasks.digits:Digits", "name": "digits", "options": {**had, "lead": True}}
    (folder / "run").mkdir()
    (folder / "run" / "spec.json").write_text(json.dumps(spec))
    ended = command("train", "--resume", "--out", "run", "--on", "ray", "--dry-run")
    assert ended.status == 0, ended.err
    meet = "train --resume --nodes=3 --rendezvous=LEADER:PORT --out=run"
    assert [meet in line for line in ended.out.splitlines()] == [True, True]


@pytest.mark.parametrize("said", ["", '{"variables": {}}\n'])
def test_the_remote_end_alone_says_so_in_one_line(said):
    ended = subprocess.run(
        [sys.executable, "-m", "paceline.cli.remote_end", "train"],
        input=said,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "error: this is started by paceline's own launcher, which says more on standard input. Use paceline train.\n"
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--on", "torchrum"], "unknown --on 'torchrum'. Did you mean 'torchrun'?"),
        (["--on", "ssh"], "--on ssh needs the machines. Give --hosts a,b,c."),
        (
            ["--on", "mpi", "--hosts", "a,b"],
            "--hosts is for machines that are reached over ssh, and --on is mpi.",
        ),
        (["--hosts", "a,,b"], "'' is no host."),
        (["--hosts", "-oProxyCommand=x,b"], "'-oProxyCommand=x' is no host."),
        (["--hosts", "a,b,a"], "names a machine twice."),
        (["--hosts", "a,b", "--ssh", "ssh '"], "is no command: No closing quotation."),
        (["--hosts", "a,b", "--ssh", " "], "--ssh is empty."),
        (["--on", "slurm"], "Use paceline submit --on slurm"),
        (["--on", "ray", "--resources", "CPU=1,CPU=2"], "--resources 'CPU=1,CPU=2' names CPU twice."),
        (["--hosts", "a,b", "--nodes", "3"], "--nodes is 3, but --hosts names 2 machines."),
        (["--hosts", "a,b", "--lead"], "the first of --hosts leads."),
        (["--on", "ray", "--nodes", "2", "--lead"], "Leave out --rendezvous and --lead."),
        (["--on", "ray", "--nodes", "2", "--rendezvous", "10.77.0.8"], "Leave out --rendezvous and --lead."),
        (["--on", "torchrun", "--nodes", "2"], "Give --rendezvous host:port, with an address of the first."),
        (["--on", "torchrun", "--nodes", "1:2", "--rendezvous", "a"], "--nodes 1:2 may change"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(command, folder, more, words):
    ended = command(*TRAIN, *more)
    assert (ended.status, ended.out) == (2, "")
    assert words in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("asked", [{"on": "local"}, {"on": "mpi"}, {"hosts": "a,b"}], ids=str)
def test_a_worker_starts_no_others(monkeypatch, asked):
    world = {"RANK": "1", "WORLD_SIZE": "2"}
    monkeypatch.setattr(os, "environ", world)
    with pytest.raises(InputError, match="but this process is rank 1 of 2 already"):
        start_elsewhere(RunOptions(workers=2), **asked)
    assert start_elsewhere(RunOptions(workers=2), on="torchrun") is None


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "3", "MASTER_PORT": "1"},
    ],
    ids=["torchrun", "mpirun"],
)
def test_a_dry_run_in_a_world_that_is_there_counts_it_once(command, folder, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", sys.exit)  # a process that a launcher started ends at once
    # Not those of the tests' own process: torch would take it for one that ends, and leave loading processes behind.
    monkeypatch.setattr(python, "run_exit_functions", lambda: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back what the command sets
        if not os.environ[name]:
            monkeypatch.delenv(name)
    ended = command(*TRAIN)
    assert ended.status == 0, ended.err
    assert "3 worker(s)" in ended.out.splitlines()[0]
    assert "8 shard(s)" in ended.out.splitlines()[0]


def test_a_machine_that_ssh_never_reaches_is_not_waited_for_at_the_end(folder):
    hanging = folder / "hanging.sh"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{one.getsockname()[1]}"
    words = ["-m", "paceline", "train", "dense4096", "--steps", "2", "--hosts", "127.0.0.1,other"]
    started = subprocess.Popen(
        [sys.executable, *words, "--rendezvous", meeting, "--join-timeout", "3", "--ssh", str(hanging)],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stderr is not None
        assert any("1 of 2 machines came" in line for line in started.stderr)
        started.wait(30)  # 50 s when it was told to end as if it were there
        assert started.returncode != 0
    finally:
        started.kill()
        started.communicate()

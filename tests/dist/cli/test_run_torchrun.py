"""`paceline run` in place of the word torchrun: each of its options is done, or refused in one line."""

import json
import socket
from pathlib import Path

import pytest

from paceline.world import env

PLAIN = Path(__file__).parents[3] / "examples" / "plain_ddp_script.py"
TELL = """
import json, os, pathlib, sys
names = ["RANK", "WORLD_SIZE", "ROLE_NAME", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
         "TORCHELASTIC_MAX_RESTARTS"]
told = {name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:]}
pathlib.Path(f"told-{os.environ['RANK']}.json").write_text(json.dumps(told))
"""
FLAKY = """
import os, sys
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"attempt {count} of rank {os.environ['RANK']}")
if count < 2 and os.environ["RANK"] == "1":
    raise ValueError("not yet")
"""
TALK = """
import os, sys
rank = os.environ["LOCAL_RANK"]
print("out", rank)
print("err", rank, end="", file=sys.stderr)
"""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def told(folder, rank=0):
    return json.loads((folder / f"told-{rank}.json").read_text())


# As pytorch's documents and examples have them, but for their numbers of processes and the script's name.
LINES = [
    "--standalone --nnodes=1 --nproc-per-node=2",
    "--nnodes=1 --nproc_per_node=2 --rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=localhost:29400",
    "--nproc_per_node=2 --nnodes=1 --node_rank=0 --master_addr=localhost --master_port={port}",
    "--nnodes=1:1 --nproc-per-node=2 --max-restarts=3 --rdzv-id=job_1 --rdzv-backend=c10d --rdzv-endpoint=localhost:0",
    "--standalone --nproc_per_node=2 --role trainer --monitor_interval=1 --start-method spawn --log_dir logs --tee 3",
]


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_of_pytorchs_documents(command, folder, line):
    (folder / "tell.py").write_text(TELL)
    port = free_port()
    ended = command("run", *line.format(port=port).split(), "tell.py", "--nnodes", "its_own")
    assert (ended.status, ended.out) == (0, ""), ended.err
    first, second = told(folder), told(folder, 1)
    assert (first["WORLD_SIZE"], second["RANK"], first["argv"]) == ("2", "1", ["--nnodes", "its_own"])
    if "master_port" in line:
        assert {first["MASTER_PORT"], second["MASTER_PORT"]} == {str(port)}
    if "rdzv-id" in line:
        assert (first["TORCHELASTIC_RUN_ID"], first["TORCHELASTIC_MAX_RESTARTS"]) == ("job_1", "3")
    if "role" in line:
        assert first["ROLE_NAME"] == "trainer"
        assert len(list(folder.glob("logs/tell-*/logs/rank-1.log"))) == 1
        assert ended.err.startswith("note: without effect: --monitor-interval (")
    else:
        assert ended.err == ""


@pytest.mark.parametrize("line", LINES[1:3])
def test_a_plain_ddp_script_trains(command, folder, line):
    ended = command("run", *line.format(port=free_port()).split(), str(PLAIN), "3")
    assert ended.status == 0, ended.err
    assert ended.out.startswith("rank 0 of 2, local rank 0: loss "), ended.out
    assert ended.out.count("\n") == 1


def test_a_program_takes_the_place_of_a_worker(command, folder):
    script = 'echo "rank $RANK of $WORLD_SIZE: $1"; ls /proc/self/fd | wc -l; exit $RANK'
    ended = command("run", "--nproc-per-node=2", "--no_python", "--tee=1", "sh", "-c", script, "name", "-m x")
    assert ended.status == 1
    assert ended.err.splitlines()[-1].endswith(" exited with status 1.")
    lines = sorted(ended.out.splitlines())
    assert lines[1::2] == [f"[default{rank}]:rank {rank} of 2: -m x" for rank in (0, 1)]
    assert {int(line.partition(":")[2]) for line in lines[::2]} == {
        4
    }  # its own three, and that of the listing


def test_a_module_and_variables_that_kubeflow_sets(command, folder, monkeypatch):
    (folder / "package").mkdir()
    (folder / "package" / "tell.py").write_text(TELL)
    for name, value in {"NPROC_PER_NODE": "2", "NNODES": "1", "MODULE": "1", "RDZV_ID": "job"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    ended = command("run", "--nproc-per-node=cpu", "package.tell", "-m")
    assert (ended.status, ended.err) == (0, "")
    assert (told(folder)["WORLD_SIZE"], told(folder)["argv"]) == (str(env.cores()), ["-m"])
    assert told(folder)["TORCHELASTIC_RUN_ID"] == "job"


def test_all_workers_are_started_over_when_one_fails(command, folder):
    (folder / "flaky.py").write_text(FLAKY)
    ended = command("run", "--nproc-per-node", 2, "--max-restarts=3", "--out", "run", "flaky.py")
    assert ended.status == 0
    assert ended.out == "attempt 0 of rank 0\nattempt 1 of rank 0\nattempt 2 of rank 0\n"
    assert ended.err.count("ValueError: not yet") == 2
    assert ended.err.endswith("note: starting all workers over: 2 of --max-restarts 3.\n")
    assert (folder / "run" / "logs" / "rank-1.log").read_text().count("attempt") == 3
    ended = command("run", "--nproc-per-node", 2, "--max_restarts=1", "flaky.py")
    assert (ended.status, ended.err.count("ValueError: not yet")) == (1, 2)


@pytest.mark.parametrize(
    ("options", "out", "err"),
    [
        ("-t 3", ["[default0]:out 0", "[default1]:out 1"], ["[default0]:err 0", "[default1]:err 1"]),
        ("--redirects 0:3,1:1 --tee 1:1", ["[default1]:out 1"], ["err 1"]),
        ("--local-ranks-filter=1", ["out 1"], ["err 1"]),
        ("-r 3", [], []),
    ],
)
def test_whose_output_is_shown(command, folder, options, out, err):
    (folder / "talk.py").write_text(TALK)
    ended = command("run", "--nproc-per-node=2", *options.split(), "--out", "run", "talk.py")
    assert ended.status == 0
    assert (sorted(ended.out.splitlines()), sorted(ended.err.splitlines())) == (out, err)
    for rank in (0, 1):
        log = (folder / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert {f"out {rank}", f"err {rank}"} <= {*log.replace(f"err {rank}", f"err {rank}\n").splitlines()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=localhost:29400", "Give one number of machines"),
        ("--nnodes=2", "need a place to meet. Give --master-addr"),
        ("--nnodes=2 --rdzv-backend=c10d", "Give --rdzv-endpoint"),
        ("--nnodes=2 --node-rank=1 --master-addr=127.0.0.1", "that is this machine"),
        ("--nnodes=4 --node-rank=2 --master-addr=10.0.0.1", "numbered as they come"),
        ("--nnodes=2 --node-rank=2 --master-addr=10.0.0.1", "numbered from 0 to 1"),
        ("--nnodes=2 --node-rank=0 --master-addr=127.0.0.1 --max-restarts 1", "is for one machine"),
        ("--nnodes=2 --node-rank=0 --master-addr=127.0.0.1 --tee 3", "are for one machine"),
        ("--nnodes=two", "--nnodes 'two' is no number of machines"),
        ("--node-rank=1", "there is one machine"),
        ("--master-addr=192.0.2.1", "is no address of this machine"),
        ("--standalone --nnodes=2", "--standalone is one machine"),
        ("--rdzv-backend=etcd", "Use c10d or static"),
        ("--rdzv-conf=read_timeout=3", "--rdzv-conf read_timeout means nothing here"),
        ("--nproc-per-node=gpu", "no GPU that torch can use"),
        ("--nproc-per-node=tpu", "Give one, gpu, cpu or auto"),
        ("-n 2 --nproc-per-node=2", "two names of one number"),
        ("--nodes 2 --nnodes 2 --rdzv-endpoint localhost --rdzv-backend c10d", "say the same"),
        ("--virtual-local-rank", "use LOCAL_RANK in the script"),
        ("--numa-binding=node", "workers are not bound to cores"),
        ("--local-addr=10.0.0.1", "GLOO_SOCKET_IFNAME"),
        ("--logs-specs=mine", "Use --log-dir"),
        ("--event-log-handler=console", "Leave it out"),
        ("--signals-to-handle=SIGUSR1", "--signals-to-handle is not taken"),
        ("--duplicate-stdout-filters=a", "output is not filtered"),
        ("--tee=4", "names no streams"),
        ("--local-ranks-filter=a", "no list of local ranks"),
        ("--max-restarts=-1", "must be at least 0"),
        ("--log-dir=a --out=b", "Give one"),
        ("--no-python -m", "Give one"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(command, folder, options, words):
    (folder / "script.py").write_text("print('ran')")
    ended = command("run", *options.split(), "script.py")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert words in ended.err
    assert ended.err.count("\n") == 1
    assert list(folder.iterdir()) == [folder / "script.py"]


def test_a_port_that_is_taken_and_a_program_that_is_not_there(command, folder):
    (folder / "script.py").write_text("print('ran')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = command("run", "--master-port", taken.getsockname()[1], "script.py")
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "Leave it out, and a free port is taken." in ended.err
    ended = command("run", "--no-python", "./no-such-program")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == "error: the program ./no-such-program cannot be run: No such file or directory.\n"


def test_every_option_of_torchrun_is_known():
    """Those of the torch that is installed: a new one is to be decided on."""
    from dataclasses import fields

    from torch.distributed.run import get_args_parser

    from paceline.launch.torchrun_options import TorchrunOptions

    positional = {"help", "training_script", "training_script_args", "module"}
    theirs = {action.dest for action in get_args_parser()._actions} - positional
    assert theirs <= {one.name for one in fields(TorchrunOptions)}

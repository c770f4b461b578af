"""`paceline doctor` on this machine, and on it with something really wrong."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline.doctor import exchange
from paceline.doctor.finding import Level
from paceline.doctor.hosts import parsed
from paceline.errors import InputError
from tests.patience import HANG_S

SHOW = """
import json
from paceline import documents
from paceline.doctor import limits, machine, network
from paceline.doctor.finding import attempt
checks = (
    limits.open_files, limits.shared_memory, limits.address_space, limits.processes, machine.processor, machine.memory,
    network.addresses, network.named_interfaces, network.proxies,
)
found = [one for check in checks for one in attempt(check.__name__, check)]
import sys
assert "torch" not in sys.modules
print(json.dumps(documents.plain(found)))
"""
"""Prints what the checks that need no worker find, where and as it is started."""


def found_under(*command, **variables):
    """Start the checks under a command that takes something from them."""
    done = subprocess.run(
        [*command, sys.executable, "-c", SHOW],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env={**os.environ, **variables},
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wrong(found, check):
    """Give what is not as it should be of one check."""
    return [
        (one["level"], one["what"], one["remedy"])
        for one in found
        if one["check"] == check and one["level"] != "ok"
    ]


def test_a_sound_machine_can_start(command, folder):
    ended = command("doctor", "--json")
    told = json.loads(ended.out)
    assert (ended.status, told["holds"], ended.err) == (0, True, "")
    assert not [one for one in told["findings"] if one["level"] == "fail"]
    (gloo,) = [one for one in told["findings"] if one["facts"].get("backend") == "gloo"]
    assert [one["bytes"] for one in gloo["facts"]["timings"]] == [1 << 10, 1 << 20, 16 << 20]
    assert all(one["bus_bytes_per_s"] > 0 for one in gloo["facts"]["timings"])
    looked_at = {one["check"] for one in told["findings"]}
    assert {"versions", "processor", "memory", "shared memory", "files", "network", "devices"} <= looked_at
    assert told["advice"]
    assert list(folder.iterdir()) == []


def test_an_interface_that_is_not_there_keeps_training_from_starting(command, folder, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    ended = command("doctor", "--backend", "gloo")
    assert (ended.status, ended.err) == (1, "")
    assert "fail  network" in ended.out
    assert "GLOO_SOCKET_IFNAME is 'ib7', and there is no interface 'ib7'" in ended.out
    assert "Unset GLOO_SOCKET_IFNAME" in ended.out
    assert "gloo: an all-reduce between workers of this machine fails" in ended.out
    assert ended.out.splitlines()[-1].startswith("Training cannot start here: 2 faults.")


def test_a_backend_that_was_asked_for_and_is_not_here_is_a_fault(command, folder):
    ended = command("doctor", "--backend", "nccl")
    if torch.cuda.is_available():
        pytest.skip("nccl can be used here")
    assert (ended.status, ended.err) == (1, "")
    assert "fail  backends" in ended.out


def test_a_process_that_is_a_world_of_one_is_tried_with_workers_of_its_own(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    (gloo,) = exchange.backends({"devices": [], "backends": {"gloo": True}}, "gloo")
    assert (gloo.check, gloo.level) == ("all-reduce", Level.OK)
    assert all(one["bus_bytes_per_s"] > 0 for one in gloo.facts["timings"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "glooo"), "unknown backend 'glooo'. Did you mean 'gloo'?"),
        (("--hosts", "a,,b"), "--hosts 'a,,b' is no list of machines."),
        (("--port", "0"), "Invalid value for '--port'"),
        (("--wait", "-1"), "--wait is -1"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(command, arguments, words):
    ended = command("doctor", *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert words in ended.err
    assert ended.err.count("\n") == 1


def test_hosts_are_read():
    assert parsed("a, b.example,10.0.0.3,a,fd00::1") == ["a", "b.example", "10.0.0.3", "fd00::1"]
    with pytest.raises(InputError, match="no list of machines"):
        parsed("user@a")


def test_few_open_files_are_counted_in_workers():
    found = found_under("prlimit", "--nofile=64")
    ((level, what, remedy),) = wrong(found, "files")
    assert (level, what) == ("warn", "a process may have 64 files open, enough for 3 workers")
    assert "ulimit -n 65536" in remedy


def test_a_torch_that_does_not_load_keeps_training_from_starting(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12 is not there')\n")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "doctor"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 1
    assert "fail  workers" in done.stdout
    assert "no worker can be started" in done.stdout
    assert "`python -c 'import torch'`" in done.stdout
    assert "libcudart.so.12 is not there" in done.stderr


def test_a_limit_on_address_space_costs_the_shared_memory():
    found = found_under("prlimit", "--as=8589934592")
    ((level, what, _),) = wrong(found, "limits")
    assert level == "warn"
    assert "limited to 8.0 GiB" in what
    assert "over sockets" in what


def test_a_small_shared_memory_is_worth_a_look():
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    found = found_under("unshare", "--mount", "sh", "-c", mount, "sh")
    ((level, what, remedy),) = wrong(found, "shared memory")
    assert level == "warn"
    assert "has 1 MiB free of 1 MiB" in what
    assert "--shm-size" in remedy


def test_a_machine_without_network_is_told_so():
    found = found_under("unshare", "--net")
    unreachable, alone = wrong(found, "network")
    assert unreachable[0] == "fail"
    assert "does not reach itself at 127.0.0.1" in unreachable[1]
    assert "ip link set lo up" in unreachable[2]
    assert alone[0] == "warn"
    assert "this machine trains alone" in alone[1]


def test_a_machine_without_proc_is_checked_as_far_as_it_goes():
    hide = 'mount -t tmpfs tmpfs /proc && mount -t tmpfs tmpfs /sys && exec "$@"'
    found = found_under("unshare", "--mount", "sh", "-c", hide, "sh")
    ((level, what, _),) = wrong(found, "memory")
    assert level == "warn"
    assert "could not be checked: FileNotFoundError" in what
    assert not [one for one in found if one["level"] == "fail"]


def test_variables_that_lead_astray_are_named():
    found = found_under(
        OMP_NUM_THREADS="512", NCCL_SOCKET_IFNAME="=ib0", http_proxy="http://proxy:3128", no_proxy="localhost"
    )
    assert "OMP_NUM_THREADS asks each worker for 512 threads" in wrong(found, "threads")[0][1]
    assert "NCCL_SOCKET_IFNAME is '=ib0'" in wrong(found, "network")[-1][1]
    assert "1 proxy is set (http_proxy)" in wrong(found, "proxy")[0][1]


def test_variables_that_are_right_are_not(command):
    found = found_under(
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        NCCL_SOCKET_IFNAME="^docker",
        https_proxy="x",
        no_proxy="*",
    )
    assert not [one for one in found if one["check"] in ("threads", "proxy") and one["level"] != "ok"]
    assert not [one for one in found if "IFNAME" in one["what"]]


def test_what_a_trial_starts_reads_nothing_and_leaves_nothing(monkeypatch):
    """The shell takes no SIGTERM, and its child holds the pipe, as mpiexec's proxies may."""
    assert exchange.within(HANG_S, ["cat"]).stdout == ""
    monkeypatch.setattr(exchange, "GRACE_S", 0.1)
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        exchange.within(0.3, ["sh", "-c", "trap '' TERM; sleep 600 & echo $!; wait"])
    about, until = Path(f"/proc/{int(caught.value.output)}/status"), time.monotonic() + HANG_S
    while about.exists() and "Z (zombie)" not in about.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)

"""Who does not know the secret gets nothing and disturbs nobody; a machine that others do not reach is not let in."""

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.transport.control import STRANGER as CONTROL_STRANGER
from tests.fault.machines import SECRET, TIMEOUT_S, Trial
from tests.fault.strangers import NETWORK, USER
from tests.netns import IP, network
from tests.patience import HANG_S

SETPRIV = shutil.which("setpriv")
PYTHON = shutil.which("python3", path="/usr/bin:/bin")
"""One that every user may run."""


@pytest.fixture
def three(tmp_path):
    with network(3) as net:
        yield Trial(tmp_path, net)


def said(agent) -> str:
    return agent.err.read_text()


def test_a_machine_without_the_secret_is_refused_at_once_and_the_run_goes_on(trial, bits):
    leader, follower = trial.net.machines
    leading = trial.start(leader, nodes="1:2", shards=4)
    status, _, line = trial.start(follower, nodes="1:2", shards=4, secret=None).end()
    assert status == 2
    assert line.startswith(
        "error: this machine has no secret, so the one that leads at 10.77.0.1:29411 would not let it in."
    )
    trial.wait_until(lambda: trial.steps() >= 2)
    status, _, line = trial.start(follower, nodes="1:2", shards=4, secret="x" * 20).end()
    assert status == 2
    assert "the machine that leads at 10.77.0.1:29411 has another secret than this one" in line
    trial.wait_until(lambda: any("without this run's secret" in one["text"] for one in trial.events("note")))
    trial.hurry()
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"], result["recoveries"]) == (0, bits, [])


def test_a_secret_that_the_leader_made_is_told_once_and_kept_nowhere(trial):
    leader, follower = trial.net.machines
    leading = trial.start(leader, nodes="2", secret=None)
    trial.wait_until(lambda: "PACELINE_SECRET=" in said(leading))
    secret = said(leading).partition("PACELINE_SECRET=")[2].split()[0]
    assert f"PACELINE_SECRET={secret} {sys.executable} -m paceline train task.py:Small" in said(leading)
    following = trial.start(follower, nodes="2", secret=secret)
    trial.wait_until(lambda: trial.steps() >= 2)
    started = [Path("/proc", str(pid), "cmdline") for one in trial.net.machines for pid in one.pids()]
    assert not any(secret.encode() in path.read_bytes() for path in started)
    trial.hurry()
    assert (leading.end()[0], following.end()[0]) == (0, 0)
    kept = [path for path in (trial.folder / "run").rglob("*") if path.is_file()]
    assert kept
    assert not any(secret.encode() in path.read_bytes() for path in kept)


@contextlib.contextmanager
def few_open_files():
    """Have what is started here begin with the limit that most machines have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def listening(pids):
    """Give every address that these processes listen on, by reading /proc."""
    found = set()
    for pid in pids:
        own = set()
        with contextlib.suppress(OSError):
            for descriptor in Path("/proc", str(pid), "fd").iterdir():
                with contextlib.suppress(OSError):
                    own.add(str(descriptor.readlink()))
            for line in Path("/proc", str(pid), "net/tcp").read_text().splitlines()[1:]:
                _, local, _, state, *_ = fields = line.split()
                if state == "0A" and f"socket:[{fields[9]}]" in own:
                    address, port = local.split(":")
                    found.add((socket.inet_ntoa(int(address, 16).to_bytes(4, "little")), int(port, 16)))
    return sorted(found)


def as_another_user(machine, *arguments):
    """Run what another user of a machine tries."""
    prefix = [SETPRIV, "--reuid=65534", "--regid=65534", "--clear-groups"]
    command = [*prefix, PYTHON, "-c", USER, *map(json.dumps, arguments)]
    return machine.run(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")


@pytest.mark.skipif(
    os.getuid() != 0 or SETPRIV is None or PYTHON is None,
    reason="only root can become another user, with a Python of its own",
)
def test_strangers_on_the_network_and_on_the_machine_get_nothing_and_disturb_nobody(three, bits):
    """All at once, while a server takes calls from trainers of another machine."""
    leader, follower, stranger = three.net.machines
    options = {"nodes": "2", "strategy": "ps", "servers": 1}
    with few_open_files():
        leading, following = (three.start(one, **options) for one in (leader, follower))
    three.wait_until(lambda: three.steps() >= 2)
    pids = [*leader.pids(), *follower.pids()]
    places = [place for place in listening(pids) if place[0] != "127.0.0.1"]
    order_socket = json.loads((three.folder / "run" / "launcher.json").read_text())["socket"]
    network = stranger.run(
        [sys.executable, "-c", NETWORK, leader.address, SECRET, json.dumps(places)],
        stdout=subprocess.PIPE,
        text=True,
    )
    user = as_another_user(leader, pids, [order_socket])
    read = json.loads(user.communicate(SECRET, timeout=HANG_S)[0])
    tried = json.loads(network.communicate(timeout=HANG_S)[0])
    # /proc shows the arguments of every process to everybody, and they are without the secret; nothing else is shown.
    assert (read["uid"], read["found"], read["entered"]) == (65534, [], [])
    assert read["reads"] >= len(pids)
    assert read["refused"] >= 2 * len(pids)
    assert tried["ports"] >= 3  # the rendezvous, the store, and inboxes on both machines
    assert tried["replayed"] > 200
    assert (tried["answered"], tried["joined"]) == (0, [[CONTROL_STRANGER], 0])
    assert tried["idle"] >= 1250
    there = three.steps()
    three.wait_until(lambda: three.steps() > there + 2)
    assert three.events("regrouped") == []
    notes = [one["text"] for one in three.events("note")]
    # Not again when it was played back.
    assert len([one for one in notes if "not how to say hello" in one]) == 1
    assert len([one for one in notes if "without this run's secret" in one]) == 1
    logged = [
        path.read_text().count("paceline: refused") for path in (three.folder / "run" / "logs").iterdir()
    ]
    assert sorted({*logged}) in ([0, 1], [1]), logged
    three.hurry()
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"], result["recoveries"]) == (0, bits, [])
    assert following.end()[0] == 0


def keep_apart(first, second):
    """Take the way from one machine to another; both still reach the rest."""
    subprocess.run(
        [IP, "-n", first.name, "route", "add", "unreachable", second.address], check=True, timeout=HANG_S
    )


def test_a_machine_that_reaches_the_leader_only_is_not_let_in(three, bits):
    leader, follower, apart = three.net.machines
    options = {"nodes": "1:3", "workers": 1, "shards": 4}
    leading, following = (three.start(one, **options) for one in (leader, follower))
    three.wait_until(lambda: len(three.roster()) == 2 and three.steps() >= 2)
    before = three.events("regrouped")
    keep_apart(apart, follower)
    status, _, line = three.start(apart, **options).end()
    assert status == 2
    assert "this machine was not let into the run that" in line
    assert f"({apart.address}) does not reach" in line
    assert f"({follower.address}) (" in line
    three.wait_until(lambda: any("was not let in" in one["text"] for one in three.events("note")))
    assert three.events("regrouped") == before
    three.hurry()
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"]) == (0, bits)
    assert following.end()[0] == 0


def test_a_machine_that_loses_the_others_as_it_joins_is_sent_away_and_they_go_on(three, bits):
    leader, follower, apart = three.net.machines
    options = {"nodes": "1:3", "workers": 1, "shards": 4, "max-restarts": 3}
    leading, following = (three.start(one, **options) for one in (leader, follower))
    three.wait_until(lambda: len(three.roster()) == 2 and three.steps() >= 2)
    joining = three.start(apart, **options)
    three.wait_until(lambda: any("has come" in one["text"] for one in three.events("note")))
    keep_apart(apart, follower)
    status, _, line = joining.end()
    assert status == 1
    assert "has sent this machine away: " in line
    three.wait_until(lambda: len(three.roster()) == 2)
    there = three.steps()
    three.wait_until(lambda: three.steps() > there + 2)
    three.hurry()
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"]) == (0, bits)
    assert following.end()[0] == 0


def test_a_machine_whose_workers_fail_as_they_join_is_sent_away_and_the_run_goes_on(trial, bits):
    leader, follower = trial.net.machines
    leading = trial.start(leader, nodes="1:2")
    trial.wait_until(lambda: trial.steps() >= 2)
    status, _, line = trial.start(follower, nodes="1:2", fails=True).end()
    assert status == 1
    assert (
        "has sent this machine away: its workers failed to join, twice: OSError: this machine lacks what it needs"
        in line
    )
    there = trial.steps()
    trial.wait_until(lambda: trial.steps() > there + 2)
    trial.hurry()
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"], result["recoveries"]) == (0, bits, [])


def test_a_leader_whose_console_stands_still_keeps_its_machines(trial, bits):
    leader, follower = trial.net.machines
    leading, following = (trial.start(one, nodes="2") for one in (leader, follower))
    trial.wait_until(lambda: trial.steps() >= 2)
    (trial.folder / "flood").touch()  # nobody reads the leader's output before its end
    time.sleep(2.5 * TIMEOUT_S)
    assert following.process.poll() is None
    trial.hurry()
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"], result["recoveries"]) == (0, bits, [])
    assert following.end()[0] == 0

"""Who does not know the secret gets nothing and disturbs nobody; a machine that others do not reach is not let in."""

import contextlib
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fault.machines import SECRET, TIMEOUT_S, Trial
from tests.netns import IP, network
from tests.patience import HANG_S

STRANGER = """
import os, resource, select, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
from paceline.transport.control import ControlClient
from paceline.transport.secret import Secret
leader, knows = (sys.argv[1], 29411), Secret(sys.argv[2])

def relayed():
    "Have one that knows the secret call the leader through here, and keep what it says."
    listening, said = socket.create_server(("127.0.0.1", 0)), b""
    client = ControlClient("127.0.0.1", listening.getsockname()[1], knows, silence_s=5, join_s=10)
    client.send({"not": "a hello"})
    near, far = listening.accept()[0], socket.create_connection(leader)
    until = time.monotonic() + 3
    while (left := until - time.monotonic()) > 0:
        for one in select.select([near, far], [], [], left)[0]:
            chunk = one.recv(1 << 16)
            if one is near:
                said += chunk
            (far if one is near else near).sendall(chunk)
    far.close()
    near.close()
    return said

said = relayed()
for _ in range(3):
    with socket.create_connection(leader) as again:
        try:
            again.sendall(said)
            time.sleep(0.2)
        except OSError:
            pass
for number in range(50):
    with socket.create_connection(leader) as one:
        one.sendall(os.urandom(300) if number % 2 else b"\\xff" + bytes(8) + b"\\x7f" + os.urandom(100))
idle = [socket.create_connection(leader) for _ in range(1100)]
time.sleep(2)
print(len(said), len(idle))
"""


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


def test_a_stranger_on_the_network_disturbs_nobody(three, bits):
    leader, follower, stranger = three.net.machines
    with few_open_files():
        leading, following = (three.start(one, nodes="2") for one in (leader, follower))
    three.wait_until(lambda: three.steps() >= 2)
    done = stranger.run(
        [sys.executable, "-c", STRANGER, leader.address, SECRET], stdout=subprocess.PIPE, text=True
    )
    out, _ = done.communicate(timeout=HANG_S)
    assert done.returncode == 0
    assert int(out.split()[0]) > 200
    there = three.steps()
    three.wait_until(lambda: three.steps() > there + 2)
    assert three.events("regrouped") == []
    notes = [one["text"] for one in three.events("note")]
    assert (
        len([one for one in notes if "not how to say hello" in one]) == 1
    )  # not again when it was played back
    assert len([one for one in notes if "without this run's secret" in one]) == 1
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

"""Servers, roles and plain scripts on several machines: calls cross the network, and a lost machine changes no bit."""

import subprocess
import sys

from tests.fault.machines import with_secret
from tests.patience import HANG_S

ROLES = """
import paceline
from paceline import remote

@remote.function
def host_of_call():
    return remote.current().name

def command(session):
    return [remote.call(f"server:{index}", host_of_call)() for index in range(3)]

if __name__ == "__main__":
    import sys
    found = paceline.launch_roles(
        {"trainers": remote.Role(command), "servers": 3}, nodes=2, rendezvous=sys.argv[1], out="roles"
    )
    print("found", found)
"""
SCRIPT = """
import torch.distributed as dist
from paceline import remote

@remote.function
def add(first, second):
    return first + second

with remote.join() as session:
    if session.role == "trainers":
        print("sum", remote.call("server:0", add)(1, 2), session.roles, flush=True)
dist.init_process_group("gloo")
everybody = [None] * dist.get_world_size()
dist.all_gather_object(everybody, dist.get_rank())
if dist.get_rank() == 0:
    print("ranks", everybody)
dist.destroy_process_group()
"""


def test_trainers_of_a_second_machine_come_to_the_server_and_go(trial, bits):
    leader, follower = trial.net.machines
    leading = trial.start(leader, nodes="1:2", strategy="ps", servers=1)
    trial.wait_until(lambda: trial.steps() >= 3)
    assert trial.places() == [0, 0, 0]
    following = trial.start(follower, nodes="1:2", strategy="ps", servers=1)
    trial.wait_until(lambda: len(trial.roster()) == 5)
    assert trial.places() == [0, 0, 1, 1, 0]
    there = trial.steps()
    trial.wait_until(lambda: trial.steps() > there + 1)
    follower.kill()
    trial.wait_until(lambda: len(trial.roster()) == 3)
    trial.hurry()
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"]) == (0, bits)
    assert [one["workers"] for one in result["recoveries"]][-1] == 3
    assert "warning: calls are taken on eth0" in leading.err.read_text()
    following.process.wait(HANG_S)


def both(trial, *command):
    """Give the same command on both machines, and what each printed."""
    started = [
        one.run(
            [sys.executable, *command],
            cwd=trial.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=with_secret(),
        )
        for one in trial.net.machines
    ]
    printed = [one.communicate(timeout=HANG_S)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0], printed
    return printed


def test_workers_with_roles_call_each_other_across_machines(trial):
    (trial.folder / "roles.py").write_text(ROLES)
    leading, following = both(trial, "roles.py", f"{trial.net.machines[0].address}:29412")
    assert (
        "found {'trainers': (['server:0', 'server:1', 'server:2'],), 'servers': (None, None, None)}"
        in leading
    )
    assert "found {}" in following


def test_a_script_runs_on_two_machines_with_roles(trial):
    (trial.folder / "script.py").write_text(SCRIPT)
    meeting = ("--nodes", "2", "--rendezvous", f"{trial.net.machines[0].address}:29413")
    command = ("-m", "paceline", "run", *meeting, "--roles", "trainers=2,servers=1", "--out", "out")
    leading, _ = both(trial, *command, "script.py")
    assert "sum 3 trainers=2,servers=1" in leading
    assert "ranks [0, 1, 2]" in leading

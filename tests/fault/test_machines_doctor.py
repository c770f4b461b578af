"""What the doctor finds between machines: ones that reach each other, and ones between which something is wrong."""

import json
import os
import subprocess
import sys

import pytest

from tests.netns import network
from tests.patience import HANG_S

HOSTS = """
import json, sys
from paceline import documents
from paceline.doctor.hosts import hosts
print(json.dumps(documents.plain(hosts(sys.argv[2:], 29400, float(sys.argv[1])))))
"""
SILENT = """
import ctypes, json, socket, struct, sys
from dataclasses import replace
from paceline.doctor.card import Card

# The kernel asks this program about every packet to the socket, and it says: drop it. So does a firewall.
DROP = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))

def listen(port, silent):
    made = socket.create_server((sys.argv[1], port))
    if silent:
        made.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(DROP)))
    return made

open_port = sys.argv[2] == "open"
known, free = listen(29400, not open_port), listen(0, True)
print("ready", flush=True)
while True:
    with known.accept()[0] as caller:
        caller.makefile().readline()
        mine = Card.mine("silent", free.getsockname()[1])
        caller.sendall(replace(mine, clock=mine.clock + 3600, versions={**mine.versions, "torch": "0.1"}).packed())
"""
"""A machine on which packets to a port vanish, while another one may answer."""


@pytest.fixture
def net():
    with network(2) as made:
        yield made


def ask(machine, wait, *names):
    return machine.run([sys.executable, "-c", HOSTS, str(wait), *names], stdout=subprocess.PIPE, text=True)


def told(process):
    return [
        (one["level"], one["what"], one["remedy"])
        for one in json.loads(process.communicate(timeout=HANG_S)[0])
    ]


def test_machines_that_ask_at_the_same_time_find_each_other(net):
    names = [one.address for one in net.machines]
    asked = [ask(one, 60, *names) for one in net.machines]
    for process, other in zip(asked, reversed(names), strict=True):
        assert told(process) == [("ok", f"{other} ({other}:29400) is reached, and a free port of it", "")]


def test_a_machine_that_runs_nothing_is_reached_all_the_same(net):
    first, second = net.machines
    ((level, what, remedy),) = told(ask(first, 1, first.address, second.address))
    assert (level, what) == (
        "warn",
        f"{second.address} ({second.address}:29400) is reached, but nothing listened there for 1.0 s",
    )
    assert "Run the same command there" in remedy


def test_a_firewall_and_a_missing_route_are_told_apart(net):
    first, second = net.machines
    silent = second.run(
        [sys.executable, "-c", SILENT, second.address, "silent"], stdout=subprocess.PIPE, text=True
    )
    assert silent.stdout.readline() == "ready\n"
    names = (first.address, second.address, "10.99.0.1", "nobody.invalid")
    found = {words: (level, remedy) for level, words, remedy in told(ask(first, 1, *names))}
    dropped = f"{second.address} ({second.address}:29400) is not reached: no answer within 3 s"
    assert found.keys() == {
        "there is no route to 10.99.0.1 (10.99.0.1)",
        "nobody.invalid is no host that this machine knows",
        dropped,
    }
    assert {level for level, _ in found.values()} == {"fail"}
    assert "a firewall is in the way: let TCP port 29400" in found[dropped][1]


def test_free_ports_that_are_closed_other_versions_and_clocks(net):
    first, second = net.machines
    half = second.run(
        [sys.executable, "-c", SILENT, second.address, "open"], stdout=subprocess.PIPE, text=True
    )
    assert half.stdout.readline() == "ready\n"
    version, clock, port = sorted(
        told(ask(first, 1, first.address, second.address)), key=lambda one: len(one[1])
    )
    assert version[0] == "fail"
    assert version[1].endswith(f"here and 0.1 on {second.address}")
    assert clock[:2] == ("warn", f"the clock of {second.address} is 1 h 00 min ahead of this one")
    assert port[0] == "fail"
    assert f"({second.address}:29400) is reached, but not its port" in port[1]


def test_a_job_of_two_machines_is_checked_as_a_whole(net):
    job = {
        **{name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"},
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": net.machines[0].address,
        "MASTER_PORT": "29555",
    }
    ranks = [
        machine.run(
            [sys.executable, "-m", "paceline", "doctor", "--json"],
            env={**job, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, machine in enumerate(net.machines)
    ]
    (out, err), (silence, _) = [process.communicate(timeout=HANG_S) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], err
    assert silence == ""
    found = json.loads(out)["findings"]
    said = {one["check"]: one["what"] for one in found}
    first, second = (machine.address for machine in net.machines)
    assert said["hosts"].startswith("the machines reach each other: ")
    assert f"({first})" in said["hosts"]
    assert f"({second})" in said["hosts"]
    assert "2 workers of this job on 2 machines: 1 KB" in said["all-reduce"]
    assert sum(one["check"] == "memory" for one in found) == 2

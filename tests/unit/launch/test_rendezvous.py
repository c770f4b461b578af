"""Machines that find each other: real keepers, on loopback addresses and on machines made of network namespaces."""

import json
import re
import select
import signal
import socket
import subprocess
import sys
import time

import pytest

from paceline.errors import InputError
from paceline.launch.job import Job
from paceline.launch.nodes.rendezvous import (
    Failed,
    Machine,
    Met,
    Offer,
    Refused,
    Rendezvous,
    Waiting,
    read_report,
    write_report,
)
from paceline.launch.nodes.rendezvous_process import RendezvousAgent
from paceline.launch.workers import fork_server as forkserver
from paceline.world import env
from paceline.world.env import Identity
from tests.netns import network
from tests.patience import HANG_S

OFFER = Offer(control_port=4001, store_port=4002)
QUICK = {"last_call_s": 1.0, "keep_alive_s": 1, "keep_alive_attempts": 4, "poll_s": 0.2}
SPEC = {"task": "digits", "lr": "0.1"}


@pytest.mark.parametrize(
    ("endpoint", "nodes", "host", "port", "least", "most"),
    [
        ("node0:1234", "2", "node0", 1234, 2, 2),
        ("10.0.0.1", "1:4", "10.0.0.1", 29400, 1, 4),
        ("[fd00::1]:77", "3:3", "fd00::1", 77, 3, 3),
        (" [fd00::1] ", " 2 ", "fd00::1", 29400, 2, 2),
    ],
)
def test_what_the_command_line_says(endpoint, nodes, host, port, least, most):
    made = Rendezvous.parse(endpoint, nodes)
    assert (made.host, made.port, made.min_nodes, made.max_nodes) == (host, port, least, most)
    assert Rendezvous.parse(made.endpoint, made.nodes) == made


@pytest.mark.parametrize(
    ("endpoint", "nodes", "message"),
    [
        ("node0:", "2", r"--rendezvous 'node0:' is no meeting point\. Give host:port"),
        ("fd00::1", "2", r"--rendezvous 'fd00::1' is no meeting point\. .*\[address\]:port for IPv6"),
        ("node0:70000", "2", "port 70000, which is none"),
        ("", "2", "is no meeting point"),
        ("node0", "two", "--nodes 'two' is no number of machines"),
        ("node0", "3:2", "--nodes 3:2 is no number of machines"),
        ("node0", "0", "--nodes 0 is no number of machines"),
    ],
)
def test_nonsense_on_the_command_line(endpoint, nodes, message):
    with pytest.raises(InputError, match=message):
        Rendezvous.parse(endpoint, nodes)


def test_only_the_machine_with_the_address_holds_it():
    assert Rendezvous.parse("127.0.0.1", "2").is_here()
    assert not Rendezvous.parse("203.0.113.7", "2").is_here()


@pytest.mark.parametrize(
    "report",
    [
        Waiting("nobody"),
        Refused("c was sent away"),
        Failed("it went", is_input=True),
        Met(
            round=3,
            rank=1,
            nodes=2,
            machines=(Machine(host="a", address="10.0.0.1"), Machine(host="b", address="10.0.0.2")),
            leader=Machine(host="a", address="10.0.0.1"),
            local=Machine(host="b", address="10.0.0.2"),
            offer=OFFER,
        ),
    ],
)
def test_a_report_survives_the_line_it_travels_as(report):
    line = write_report(report)
    assert line.endswith(b"\n")
    assert read_report(line) == report


def test_secrets_differ_and_do_not_show():
    other = Offer(control_port=4001, store_port=4002)
    assert other.secret != OFFER.secret
    assert other.secret not in repr(other)


class Keepers:
    """Keepers forked from the fork server, and what they have reported."""

    def __init__(self):
        self.server = forkserver.shared()
        self.pids = {}
        self.ended = set()
        self.all = []
        self.unread = {}
        self.port = free_port()

    def start(self, tmp_path, *, nodes="2", leads=False, spec=SPEC, **patience):
        job = Job(
            identity=Identity(rank=0, size=1, local_rank=0, local_size=1),
            call=None,
            threads=1,
            environment=env.snapshot(),
            folder=str(tmp_path),
            search_path=forkserver.search_path(),
        )
        rendezvous = Rendezvous.parse(f"127.0.0.1:{self.port}", nodes, **(QUICK | patience))
        keeper = RendezvousAgent.start(
            self.server,
            job,
            rendezvous,
            spec=spec,
            offer=OFFER if leads else None,
            log=tmp_path / "rendezvous.log",
        )
        self.all.append(keeper)
        while (report := self.report()).get("started") != keeper.ticket:
            pass
        self.pids[keeper] = report["pid"]
        return keeper

    def report(self):
        report = self.server.report()
        self.ended.add(report.get("ended"))
        return report

    def kill(self, keeper):
        pid = self.pids.pop(keeper)
        self.server.signal(pid, signal.SIGKILL)
        while pid not in self.ended:
            self.report()

    def end(self):
        for keeper in list(self.pids):
            self.kill(keeper)
        for keeper in self.all:
            keeper.close()


@pytest.fixture
def keepers():
    made = Keepers()
    yield made
    made.end()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def wait_for(keepers, keeper, kind):
    """Give the next report of a kind; others that come with it, in any order, are there for the next call."""
    unread = keepers.unread.setdefault(keeper, [])
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        for report in unread:
            if isinstance(report, kind):
                unread.remove(report)
                return report
            assert not isinstance(report, Failed), report
        select.select([keeper], [], [], 1.0)
        unread += keeper.on_readable()
    raise AssertionError(f"no {kind.__name__} among {unread}")


def test_a_machine_with_another_command_is_told_what_differs_and_the_right_one_takes_its_place(
    keepers, tmp_path
):
    leader = keepers.start(tmp_path, leads=True)
    stray = keepers.start(tmp_path, spec=SPEC | {"lr": "0.2", "seed": "7"})
    failed = wait_for(keepers, stray, Failed)
    assert failed.is_input
    assert failed.reason == (
        f"this machine asks for another run than {env.host()} (127.0.0.1), which leads: lr is 0.2 here and 0.1 at the "
        "leader, seed is 7 here and not set at the leader. Give the same command on every machine."
    )
    right = keepers.start(tmp_path)
    ours, theirs = wait_for(keepers, leader, Met), wait_for(keepers, right, Met)
    assert (ours.nodes, theirs.nodes) == (2, 2)
    assert {ours.rank, theirs.rank} == {0, 1}
    assert ours.round == theirs.round == 1
    assert theirs.offer == ours.offer == OFFER
    assert wait_for(keepers, leader, Refused) == Refused(
        f"{env.host()} (127.0.0.1) asked for another run and was sent away: lr is 0.2 there and 0.1 at the leader, "
        "seed is 7 there and not set at the leader"
    )
    keepers.kill(leader)
    lost = wait_for(keepers, right, Failed)
    assert not lost.is_input
    assert lost.reason.startswith(
        f"the rendezvous at 127.0.0.1:{keepers.port} is gone: the machine that holds it"
    )
    assert "\n" not in lost.reason


def test_a_leader_that_nobody_joins_says_how_many_came_and_who(keepers, tmp_path):
    leader = keepers.start(tmp_path, nodes="3", leads=True, join_s=1.0)
    assert wait_for(keepers, leader, Failed) == Failed(
        f"1 of 3 machines came to 127.0.0.1:{keepers.port} within 1 s: {env.host()} (127.0.0.1). "
        "Start the same command on the others, or let --nodes allow fewer."
    )
    assert leader.on_readable() == []


def test_a_follower_without_a_leader_says_so(keepers, tmp_path):
    follower = keepers.start(tmp_path, join_s=0.5)
    assert wait_for(keepers, follower, Waiting).reason.endswith("yet: Connection refused")
    failed = wait_for(keepers, follower, Failed)
    assert re.match(
        r"no machine holds the rendezvous at 127\.0\.0\.1:\d+: Connection refused, for 0\.5 s\.",
        failed.reason,
    )


def test_a_port_that_is_taken_is_the_users_to_change(keepers, tmp_path):
    with socket.create_server(("127.0.0.1", keepers.port)):
        leader = keepers.start(tmp_path, leads=True)
        failed = wait_for(keepers, leader, Failed)
    assert failed.is_input
    assert failed.reason == (
        f"this machine cannot hold the rendezvous at 127.0.0.1:{keepers.port}: Address already in use. "
        "Give --rendezvous a port that is free."
    )


def test_a_keeper_that_is_killed_is_missed(keepers, tmp_path):
    leader = keepers.start(tmp_path, leads=True)
    assert wait_for(keepers, leader, Waiting)
    keepers.kill(leader)
    assert wait_for(keepers, leader, Failed) == Failed(
        "the process that keeps the rendezvous has ended. See its log."
    )


AGENT = """
import json, os, select, sys
from pathlib import Path
from paceline.launch.workers import fork_server as forkserver
from paceline.launch.job import Job
from paceline.launch.nodes.rendezvous import Offer, Rendezvous, write_report
from paceline.launch.nodes.rendezvous_process import RendezvousAgent
from paceline.world import env
from paceline.world.env import Identity
endpoint, nodes, patience = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
rendezvous = Rendezvous.parse(endpoint, nodes, **patience)
job = Job(
    identity=Identity(rank=0, size=1, local_rank=0, local_size=1), call=None, threads=1,
    environment=env.snapshot(), folder=os.getcwd(), search_path=forkserver.search_path(),
)
offer = Offer(control_port=1, store_port=2, secret="s") if rendezvous.is_here() else None
keeper = RendezvousAgent.start(forkserver.shared(), job, rendezvous, spec={}, offer=offer, log=Path("rendezvous.log"))
while True:
    select.select([keeper], [], [])
    for report in keeper.on_readable():
        os.write(1, write_report(report))
"""


class Agent:
    """A launcher that only keeps the rendezvous, on a machine of its own."""

    def __init__(self, machine, endpoint, nodes, folder):
        command = [sys.executable, "-c", AGENT, endpoint, nodes, json.dumps(QUICK)]
        self.machine = machine
        self.process = machine.run(command, stdout=subprocess.PIPE, bufsize=0, cwd=folder)

    def meeting(self):
        while True:
            assert select.select([self.process.stdout], [], [], HANG_S)[0], "nothing was said"
            report = read_report(self.process.stdout.readline())
            assert not isinstance(report, Failed), report
            if isinstance(report, Met):
                return report


def test_two_machines_meet_over_ipv6(tmp_path):
    with network(2) as made:
        first, second = made.machines
        endpoint = f"[{first.address_v6}]:29400"
        follower = Agent(second, endpoint, "2", tmp_path)  # before there is anybody to follow
        leader = Agent(first, endpoint, "2", tmp_path)
        ours, theirs = leader.meeting(), follower.meeting()
    addresses = [machine.address for machine in ours.machines]
    assert addresses == [machine.address for machine in theirs.machines]
    assert sorted(addresses) == [first.address_v6, second.address_v6]
    assert addresses[theirs.rank] == second.address_v6 == theirs.local.address
    assert addresses[ours.rank] == first.address_v6 == ours.local.address == ours.leader.address
    assert theirs.leader.address == first.address_v6
    assert theirs.offer == ours.offer

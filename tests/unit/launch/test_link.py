"""Links between launchers: over loopback for what they say, between network namespaces for what a cut does to them."""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from paceline.launch.nodes import link as links
from paceline.launch.nodes.handshake import Handshake
from paceline.launch.nodes.link import Link, Listener, connect
from tests.netns import network
from tests.patience import HANG_S

SECRET = b"a secret of the run"


class Pair:
    """A leader's and a follower's end in one process, with the loop that their owners would have."""

    def __init__(self, *, secret=SECRET, timeout_s=15.0):
        self.listener = Listener("127.0.0.1", SECRET, timeout_s=timeout_s)
        self.follower = connect("127.0.0.1", self.listener.port, secret, timeout_s=timeout_s)
        self.leader = None
        self.said = {"leader": [], "follower": []}

    def turn_until(self, condition, seconds=HANG_S):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            self.turn()

    def turn(self):
        if self.leader is None:
            self.leader = self.listener.accept()
        for name in self.said:
            end = getattr(self, name)
            if end is None or end.lost(time.monotonic()):
                continue
            readable, writable, _ = select.select([end], [end] if end.wants_to_write else [], [], 0.01)
            if readable:
                self.said[name] += end.on_readable()
            if writable:
                end.on_writable()
            end.tick(time.monotonic())

    def open(self):
        self.turn_until(lambda: self.leader and self.leader.is_open and self.follower.is_open)
        return self

    def reason(self, name):
        self.turn_until(lambda: getattr(self, name) and getattr(self, name).lost(time.monotonic()))
        return getattr(self, name).lost(time.monotonic())

    def close(self):
        for end in (self.leader, self.follower, self.listener):
            if end is not None:
                end.close()


@pytest.fixture
def pair():
    made = []

    def make(**options):
        made.append(Pair(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def stranger(port):
    return socket.create_connection(("127.0.0.1", port), timeout=HANG_S)


def frame(body):
    return struct.pack("!I", len(body)) + body


def test_messages_arrive_in_order_both_ways_also_those_sent_before_the_link_is_open(pair):
    made = pair()
    made.follower.send({"early": "ä"})
    made.open()
    for number in range(1000):
        made.leader.send({"number": number})
    made.follower.send({"list": [1, None, 2.5], "nested": {"true": True}})
    made.turn_until(lambda: len(made.said["follower"]) == 1000 and len(made.said["leader"]) == 2)
    assert made.said["follower"] == [{"number": number} for number in range(1000)]
    assert made.said["leader"] == [{"early": "ä"}, {"list": [1, None, 2.5], "nested": {"true": True}}]


def test_a_message_larger_than_the_network_takes_at_once_arrives_whole(pair):
    made = pair().open()
    text = "x" * (12 << 20)
    made.leader.send({"text": text})
    assert made.leader.wants_to_write
    made.turn_until(lambda: made.said["follower"])
    assert made.said["follower"] == [{"text": text}]
    assert not made.leader.wants_to_write


def test_a_message_over_the_limit_is_refused_where_it_is_sent(pair):
    made = pair().open()
    with pytest.raises(ValueError, match="more than a link takes"):
        made.leader.send({"text": "x" * links.LARGEST_MESSAGE})
    assert made.leader.is_open


def test_silence_is_filled_with_heartbeats_that_nobody_sees(pair):
    made = pair().open()
    made.turn()
    before = time.monotonic()
    made.follower.tick(before + links.HEARTBEAT_S)
    select.select([made.leader], [], [], HANG_S)
    assert made.leader.on_readable() == []
    assert made.leader.lost(before + links.TIMEOUT_S) is None
    assert made.follower.lost(before + links.TIMEOUT_S) is not None


def test_an_end_that_says_nothing_is_given_up_by_the_other(pair):
    made = pair(timeout_s=0.5).open()
    now = time.monotonic()
    assert made.leader.lost(now) is None
    assert 0 <= made.leader.tick(now) <= 0.1
    assert made.leader.lost(now + 0.6) == f"nothing was heard from {made.leader.peer} for 0.5 s"
    assert not made.leader.is_open


def test_an_end_that_was_stopped_itself_reads_before_it_judges(pair):
    made = pair(timeout_s=0.5).open()
    made.follower.send({"still": "here"})
    select.select([made.leader], [], [], HANG_S)
    assert made.leader.lost(time.monotonic() + 60) is None
    assert made.leader.on_readable() == [{"still": "here"}]


def test_another_secret_is_refused_and_nothing_said_is_heard(pair):
    made = pair(secret=b"another")
    made.follower.send({"do": "harm"})
    assert made.reason("leader") == f"{made.leader.peer} does not know this run's secret"
    assert made.reason("follower") == f"{made.follower.peer} closed the connection"
    assert made.said["leader"] == []


def test_a_follower_tells_a_leader_that_does_not_know_the_secret(pair):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        follower = connect("127.0.0.1", listening.getsockname()[1], SECRET)
        with listening.accept()[0] as false_leader:
            false_leader.settimeout(HANG_S)
            false_leader.sendall(frame(json.dumps({"challenge": "0" * 32}).encode()))
            select.select([follower], [], [], HANG_S)
            follower.on_readable()
            said = false_leader.recv(1000)
            answer = json.loads(said[4:])["answer"]
            false_leader.sendall(frame(json.dumps({"answer": answer}).encode()))  # its own words, played back
            select.select([follower], [], [], HANG_S)
            follower.on_readable()
    assert SECRET not in said
    assert "does not know this run's secret" in follower.lost(time.monotonic())


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (frame(b"x" * 300)[:4], "announced a message of 300 bytes; the most is 256"),
        (struct.pack("!I", 0xFFFFFFFF), "announced a message of 4294967295 bytes; the most is 256"),
        (b"GET / HTTP/1.1\r\n\r\n", "announced a message of 1195725856 bytes; the most is 256"),
        (frame(b"[1]"), "sent a message that is no JSON object"),
        (frame(b"\xff\xfe"), "sent a message that is no JSON object"),
        (frame(b"[" * 200), "sent a message that is no JSON object"),
        (frame(b"{}"), "does not know this run's secret"),
        (frame(b'{"challenge": 7, "answer": null}'), "does not know this run's secret"),
        (b"", "closed the connection"),
    ],
)
def test_a_stranger_that_talks_nonsense_is_shown_out_with_a_reason(pair, sent, reason):
    made = pair()
    made.follower.close()
    made.turn_until(lambda: made.leader)
    made.leader.close()
    with stranger(made.listener.port) as other:
        made.leader = None
        made.turn_until(lambda: made.leader)
        other.sendall(sent)
        other.shutdown(socket.SHUT_WR)
        assert made.reason("leader") == f"{made.leader.peer} {reason}"


def test_a_stranger_that_only_drips_is_shown_out_in_time(pair):
    made = pair(timeout_s=0.3)
    made.follower.close()
    made.turn_until(lambda: made.leader)
    made.leader.close()
    with stranger(made.listener.port) as other:
        made.leader = None
        made.turn_until(lambda: made.leader)
        other.sendall(struct.pack("!I", 200))
        while not (reason := made.leader.lost(time.monotonic())):
            other.sendall(b" ")
            made.turn()
            time.sleep(0.05)
    assert reason == f"no link came about with {made.leader.peer} within 0.3 s"


def test_an_oversized_message_of_an_end_that_has_proved_itself_closes_the_link(pair):
    made = pair().open()
    made.follower._channel.send(struct.pack("!I", links.LARGEST_MESSAGE + 1))
    assert "announced a message of 16777217 bytes; the most is 16777216" in made.reason("leader")


def test_last_words_are_heard_before_the_end(pair):
    made = pair().open()
    made.leader.send({"last": "words"})
    made.leader.close()
    made.follower.send({"too": "late"})
    made.turn_until(lambda: made.follower.lost(time.monotonic()))
    assert made.said["follower"] == [{"last": "words"}]
    assert made.follower.lost(time.monotonic()).startswith((made.follower.peer, "the connection to"))


def test_nobody_there(pair):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    follower = connect("127.0.0.1", port, SECRET)
    select.select([follower], [follower], [], HANG_S)
    follower.on_readable()
    assert follower.lost(time.monotonic()) == f"the connection to 127.0.0.1:{port} broke: Connection refused"


def test_an_end_that_takes_nothing_does_not_fill_our_memory(pair, monkeypatch):
    monkeypatch.setattr(links, "LARGEST_BACKLOG", 1 << 20)
    made = pair().open()
    for _ in range(100):
        made.leader.send({"text": "x" * (1 << 18)})
    assert "takes nothing of what is sent to it" in made.leader.lost(time.monotonic())


def test_a_handshake_takes_the_answer_to_its_own_challenge_only():
    leader, follower = Handshake(SECRET, leads=True), Handshake(SECRET, leads=False)
    reply = follower.take(leader.opening())
    other = Handshake(SECRET, leads=True)
    other.take(reply)  # recorded elsewhere, played back here
    assert other.refused
    assert not other.done
    final = leader.take(reply)
    assert leader.done
    follower.take(final)
    assert follower.done


END = """
import json, os, select, sys, time
from paceline.launch.nodes.link import Listener, connect
role, address, port, timeout_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
tell = lambda **what: print(json.dumps(what), flush=True)
if role == "leader":
    listener = Listener(address, b"secret", port=port, timeout_s=timeout_s)
    tell(listening=True)
    select.select([listener], [], [], 30)
    link = listener.accept()
else:
    link = connect(address, port, b"secret", timeout_s=timeout_s)
opened, began = False, time.monotonic()
while not (reason := link.lost(time.monotonic())):
    ready, writable, _ = select.select([link, 0], [link] if link.wants_to_write else [], [], link.tick(time.monotonic()))
    for message in link.on_readable() if link in ready else []:
        tell(heard=message["line"])
    if writable:
        link.on_writable()
    if link.is_open and not opened:
        opened = True
        tell(open=True)
    if 0 in ready:
        link.send({"line": os.read(0, 100).decode()})
tell(lost=reason)
"""


class End:
    """One end in a process on a machine of its own."""

    def __init__(self, machine, role, address, timeout_s):
        self.process = machine.run(
            [sys.executable, "-c", END, role, address, "7000", str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def send(self, line):
        os.write(self.process.stdin.fileno(), line.encode())

    def next(self):
        assert select.select([self.process.stdout], [], [], HANG_S)[0], "nothing was said"
        return json.loads(self.process.stdout.readline())

    def says_nothing_for(self, seconds):
        return not select.select([self.process.stdout], [], [], seconds)[0]


def linked(made, timeout_s, *, v6=False):
    first, second = made.machines
    address = first.address_v6 if v6 else first.address
    leader = End(first, "leader", address, timeout_s)
    assert leader.next() == {"listening": True}
    follower = End(second, "follower", address, timeout_s)
    assert leader.next() == {"open": True}
    assert follower.next() == {"open": True}
    return leader, follower


def test_a_cut_that_heals_within_the_time_out_loses_nothing():
    with network(2) as made:
        leader, follower = linked(made, timeout_s=12, v6=True)
        made.cut(made.machines[1])
        follower.send("said during the cut")
        leader.send("also")
        assert leader.says_nothing_for(2)
        made.heal(made.machines[1])
        assert leader.next() == {"heard": "said during the cut"}
        assert follower.next() == {"heard": "also"}


def test_a_cut_for_good_is_seen_by_both_ends_on_their_own():
    with network(2) as made:
        leader, follower = linked(made, timeout_s=3)
        made.cut(made.machines[1])
        assert follower.next() == {"lost": f"nothing was heard from {made.machines[0].address}:7000 for 3 s"}
        lost = leader.next()["lost"]
        assert lost.startswith(f"nothing was heard from {made.machines[1].address}:")


def test_a_machine_whose_process_dies_is_seen_at_once():
    with network(2) as made:
        leader, follower = linked(made, timeout_s=20)
        follower.process.kill()
        assert "closed the connection" in leader.next()["lost"]


def test_an_end_that_is_stopped_beyond_the_time_out_is_given_up_and_learns_of_it():
    with network(2) as made:
        leader, follower = linked(made, timeout_s=3)
        follower.process.send_signal(signal.SIGSTOP)
        assert "nothing was heard from" in leader.next()["lost"]
        follower.process.send_signal(signal.SIGCONT)
        assert "closed the connection" in follower.next()["lost"]


def test_a_listener_is_reached_at_its_own_address_only():
    listener = Listener("127.0.0.2", SECRET)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.port), timeout=HANG_S)
    link: Link = connect("127.0.0.2", listener.port, SECRET)
    select.select([listener], [], [], HANG_S)
    taken = listener.accept()
    assert taken is not None
    for one in (link, taken, listener):
        one.close()

"""A leader and what comes to it, on the loopback interface: who is let in, who is not, and what each is told."""

import contextlib
import select
import selectors
import socket
import threading
import time

import pytest

from paceline.errors import InputError, PacelineError
from paceline.launch.base import LaunchSpec
from paceline.launch.console import Console
from paceline.launch.job import ScriptCall
from paceline.launch.local import LocalLauncher
from paceline.launch.nodes import machines
from paceline.launch.nodes.follower import Follower
from paceline.launch.nodes.hello import Hello, spec_of
from paceline.launch.nodes.leading import Leading
from paceline.launch.nodes.rendezvous import Rendezvous
from paceline.transport.control import NO_LEADER, ControlClient, ControlServer, Gone, Said
from paceline.transport.secret import Secret
from paceline.world import env
from tests.patience import HANG_S

HERE = "127.0.0.1"
SPEC = {"task": "digits", "lr": "0.1"}


@pytest.fixture
def secret(monkeypatch):
    made = Secret.make()
    monkeypatch.setenv("PACELINE_SECRET", made.text)
    return made


@pytest.fixture
def plan(secret):
    def make(nodes="1:2", agreed=SPEC, shared=None, **patience):
        with socket.create_server((HERE, 0)) as free:
            port = free.getsockname()[1]
        patience = {"last_call_s": 0.2, "silence_s": 4.0} | patience
        spec = LaunchSpec(
            call=ScriptCall(target="script.py", is_module=False),
            workers=1,
            rendezvous=Rendezvous.parse(f"{HERE}:{port}", nodes, **patience),
            agreed=agreed,
            shared=shared or {},
        )
        return LocalLauncher().plan(spec)

    return make


class Leader:
    """One that leads, with everything that it tells its supervisor."""

    def __init__(self, plan):
        self.plan = plan
        self.selector = selectors.DefaultSelector()
        self.told, self.here = [], {}
        self.leading = Leading(plan, self.selector, self, Console())
        self.leading.open()

    def arrived(self, machine, pool):
        self.here[machine.index] = pool

    def left(self, machine, fate):
        del self.here[machine.index]
        self.told.append(f"{machine.name} {fate}")

    def remark(self, text):
        self.told.append(text)

    def unmet(self, failure):
        self.told.append(failure.message)

    def started(self, number, pid):
        self.told.append(("started", number, pid))

    def said(self, number, kind, value):
        self.told.append((number, kind, value))

    def ended(self, number, status, why=""):
        self.told.append(("ended", number))

    def until(self, condition):
        deadline = time.monotonic() + HANG_S
        while not (found := condition()):
            assert time.monotonic() < deadline, self.told
            wait = self.leading.tick()
            self.leading.gathered()
            for key, _ in self.selector.select(min(wait, 0.05)):
                key.data()
        return found

    def says(self, words):
        return self.until(lambda: [one for one in self.told if isinstance(one, str) and words in one])[-1]


class Visitor:
    """Another machine's launcher, as far as the leader sees it."""

    def __init__(self, leader, *, spec=None, port=None, answers=True, **hello):
        plan = leader.plan
        self.answers, self.messages, self.gone = answers, [], False
        self.listening = socket.create_server((HERE, 0))
        self.client = ControlClient(HERE, plan.rendezvous.port, plan.secret, silence_s=4.0, join_s=HANG_S)
        fields = {
            "host": "other",
            "address": HERE,
            "dialed": HERE,
            "workers_address": HERE,
            "port": port or self.listening.getsockname()[1],
            "spec": spec_of(plan.agreed, plan.rendezvous) if spec is None else spec,
        } | hello
        self.client.send({"hello": fields})

    def heard(self, name):
        for event in self.client.events():
            self.gone = self.gone or isinstance(event, Gone)
            if isinstance(event, Said):
                self.messages.append(event.message)
                if event.message.get("do") == "reach" and self.answers:
                    self.client.send({"reached": event.message["trial"], "failed": {}})
        return next((one[name] for one in self.messages if name in one), None)

    def close(self):
        self.client.close()
        self.listening.close()


@pytest.fixture
def lead(plan):
    made = []

    def one(**options):
        made.append(Leader(plan(**options)))
        return made[-1]

    yield one
    for leader in made:
        leader.leading.close()
        leader.selector.close()


@pytest.fixture
def visit():
    made = []

    def one(leader, **options):
        made.append(Visitor(leader, **options))
        return made[-1]

    yield one
    for visitor in made:
        visitor.close()


def test_a_machine_that_reaches_all_is_let_in_and_heard(lead, visit):
    leader = lead()
    visitor = visit(leader)
    assert leader.until(lambda: visitor.heard("welcome")) == {"host": env.host(), "address": HERE}
    assert leader.leading.gathered()
    pool = leader.here[1]
    pool._numbers.add(7)
    for number in (7, 8):  # the second is another machine's
        visitor.client.send({"started": number, "pid": 123})
    visitor.client.send({"said": "leaving", "number": 7, "value": None})
    leader.until(lambda: (7, "leaving", None) in leader.told)
    assert [one for one in leader.told if one[0] == "started"] == [("started", 7, 123)]
    visitor.close()
    assert leader.says("is lost: it has ended, or nothing was heard of it for 4 s")


def test_a_machine_with_another_command_is_told_what_differs_and_so_is_the_leader(lead, visit):
    leader = lead()
    stray = visit(leader, spec=spec_of(SPEC | {"lr": "0.2", "seed": "7"}, leader.plan.rendezvous))
    assert leader.until(lambda: stray.heard("refused")) == (
        f"this machine asks for another run than {env.host()} ({HERE}), which leads: lr is 0.2 here and 0.1 at the "
        "leader, seed is 7 here and not set at the leader. Give the same command on every machine."
    )
    assert leader.says("was sent away") == (
        f"other ({HERE}) asked for another run and was sent away: lr is 0.2 there and 0.1 at the leader, "
        "seed is 7 there and not set at the leader."
    )
    assert leader.here == {}


def test_a_leader_that_nobody_joins_says_how_many_came_and_who(lead):
    leader = lead(nodes="3", join_s=0.5)
    assert leader.says("of 3 machines") == (
        f"1 of 3 machines came to {leader.plan.rendezvous.endpoint} within 0.5 s: {env.host()} ({HERE}). "
        "Start the same command on the others, or let --nodes allow fewer."
    )


def test_one_too_many_waits_until_another_leaves(lead, visit):
    leader = lead()
    first = visit(leader)
    leader.until(lambda: first.heard("welcome"))
    second = visit(leader)
    assert leader.until(lambda: second.heard("full")) == 2
    first.close()
    leader.until(lambda: second.heard("welcome"))
    assert list(leader.here) == [2]


def test_a_trial_does_not_wait_for_a_machine_that_is_sent_away_meanwhile(lead, visit):
    leader = lead(nodes="1:3")
    first = visit(leader, host="first")
    leader.until(lambda: first.heard("welcome"))
    first.answers = False
    second = visit(leader)
    assert leader.until(lambda: second.heard("do")) == "reach"
    leader.leading.expel(1, "it is late")
    assert 1 not in leader.leading._admission._trial.awaited
    leader.until(lambda: second.heard("welcome"))
    assert not first.gone


def test_a_machine_that_cannot_be_reached_is_turned_away_by_name(lead, visit):
    leader = lead()
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    hidden = visit(leader, port=port)
    sentence = leader.until(lambda: hidden.heard("refused"))
    assert f"{env.host()} ({HERE}) does not reach other ({HERE}) (Connection refused)" in sentence
    assert (
        leader.says("was not let in") in f"other ({HERE}) was not let in: {sentence.partition('leads: ')[2]}"
    )
    assert leader.here == {}


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"started": "x", "pid": 1},
        {"said": "broken", "number": 7, "value": {"operation": "x"}},
        {"said": "failure", "number": 7, "value": {"rank": 0, "host": "h", "kind": "no", "message": ""}},
        {"said": "sings", "number": 7, "value": None},
        {"readings": [[1, {}, "S"]]},
        {"evidence": [5]},
        {"events": "no event\n", "number": 7},
        {"output": "log", "text": "x"},
        {"hello": {}},
        {"reached": 1, "failed": [1]},
    ],
)
def test_a_message_that_makes_no_sense_costs_whoever_sent_it(lead, visit, message):
    leader = lead()
    visitor = visit(leader)
    leader.until(lambda: visitor.heard("welcome"))
    visitor.client.send(message)
    assert "it sent a message that makes no sense" in leader.says("was sent away")
    assert leader.here == {}
    leader.until(lambda: visitor.heard("reason"))
    other = visit(leader)
    leader.until(lambda: other.heard("welcome"))


@pytest.mark.parametrize(
    "hello", [{"address": "nowhere"}, {"port": 70000}, {"host": "a\033[2J"}, {"spec": {"a": 1}}, {"x": 1}]
)
def test_a_hello_that_makes_no_sense_is_turned_away(lead, visit, hello):
    leader = lead()
    visitor = visit(leader, **hello)
    leader.until(lambda: visitor.heard("refused"))
    assert "not how to say hello" in leader.says("turned away")


def test_a_port_that_is_taken_is_the_users_to_change(plan):
    made = plan()
    with socket.create_server((HERE, made.rendezvous.port)):
        leader = Leader(made)
        assert leader.says("cannot hold") == (
            f"this machine cannot hold the rendezvous at {made.rendezvous.endpoint}: Address already in use. "
            "Give --rendezvous a port that is free."
        )
        leader.leading.close()
    leader.selector.close()


def test_a_leader_without_a_secret_makes_one_and_says_how_to_bring_it_to_the_others(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/paceline", "train", "a task", "--lead"])
    secret, invitation = machines.shared_secret(Rendezvous.parse(HERE, "2"), None)
    assert invitation == f"PACELINE_SECRET={secret.text} paceline train 'a task'"
    assert machines.shared_secret(None, None) == (None, "")
    with pytest.raises(InputError, match="this machine has no secret, so the one that leads at 203"):
        machines.shared_secret(Rendezvous.parse("203.0.113.7", "2"), None)
    with pytest.raises(InputError, match="--secret-file is for several machines"):
        machines.shared_secret(None, "file")


def follow(plan, orders, folder):
    """Follow a leader that gives these orders, and say how it went."""
    (folder / "logs").mkdir()
    server = ControlServer(HERE, plan.rendezvous.port, plan.secret, silence_s=4.0)
    done = threading.Event()

    def serve():
        while not done.is_set():
            select.select([server], [], [], 0.05)
            for event in server.events():
                if isinstance(event, Said) and "hello" in event.message:
                    Hello.read(event.message)
                    for order in orders:
                        server.send(event.peer, order)

    thread = threading.Thread(target=serve)
    thread.start()
    follower = Follower(plan, folder, Console())
    try:
        return follower.run()
    finally:
        follower.close()
        done.set()
        thread.join()
        server.close()


WELCOME = {"welcome": {"host": "a", "address": HERE}}
START = {
    "do": "start",
    "number": 0,
    "identity": {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1},
    "newcomer": False,
    "starts": 0,
    "threads": 1,
    "shared": {},
    "log": "rank-0.log",
}


@pytest.mark.parametrize(
    "order",
    [
        START | {"log": "../rank-0.log"},
        START | {"log": "/etc/rank-0.log"},
        START | {"shared": {"LD_PRELOAD": "x"}},
        START | {"identity": {"rank": "0", "size": 1, "local_rank": 0, "local_size": 1}},
        {"do": "signal", "number": 0, "signal": 4000},
        {"do": "harm"},
        {"do": "reach", "trial": 1, "targets": [1]},
    ],
)
def test_an_order_that_reaches_further_than_the_run_ends_the_follower(plan, tmp_path, order):
    with pytest.raises(PacelineError):
        follow(plan(shared={"PACELINE_SECRET": "x"}), [WELCOME, order], tmp_path)
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_follower_is_told_the_end(plan, tmp_path):
    outcome = follow(plan(), [WELCOME, {"do": "end", "failure": None, "input": False}], tmp_path)
    assert (outcome.status, outcome.led_by) == (0, f"a ({HERE})")


def test_a_follower_without_a_leader_says_so(plan, tmp_path):
    made = plan(join_s=0.5)
    (tmp_path / "logs").mkdir()
    follower = Follower(made, tmp_path, Console())
    try:
        outcome = follower.run()
    finally:
        follower.close()
    assert outcome.status == 2
    assert outcome.failure.message == (
        f"no machine holds the rendezvous at {made.rendezvous.endpoint}: nobody answers there, for 0.5 s. "
        f"Start the same command on {HERE}, or check the address and the firewall."
    )


def test_a_follower_behind_a_proxy_without_a_leader_calls_until_its_time_is_up(plan, tmp_path):
    made = plan(join_s=3.5)
    (tmp_path / "logs").mkdir()
    follower, taken = Follower(made, tmp_path, Console()), []
    ended = threading.Event()

    def close_each():
        while not ended.is_set():
            with contextlib.suppress(OSError):
                taken.append(listening.accept()[0].close())

    with socket.create_server((HERE, made.rendezvous.port)) as listening:
        listening.settimeout(0.05)
        proxy = threading.Thread(target=close_each)
        proxy.start()
        try:
            outcome = follower.run()
        finally:
            follower.close()
            ended.set()
            proxy.join()
    assert outcome.status == 2
    assert outcome.failure.message == (
        f"no machine holds the rendezvous at {made.rendezvous.endpoint}: {NO_LEADER}, for 3.5 s. "
        f"Start the same command on {HERE}, or check the address and the firewall."
    )
    assert len(taken) > 6

"""Machines that come together are tried together: who is let in, who is blamed, and how much is said."""

import selectors

import pytest

from paceline.launch.nodes.admission import AGAIN_S, ANSWER_S, Admission, FollowingMachine
from paceline.launch.nodes.reachability import ReachablePort, Target
from tests.patience import HANG_S

HERE = "127.0.0.1"


class Lobby:
    """An admission, machines whose ports take connections, and what each of them does not reach."""

    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self.ports, self.present, self.asked, self.refused = [], [], [], {}
        self.cut = set()
        self.gone = None
        """Who goes when it is asked."""
        self.now = 0.0
        """Before any deadline of the attempts, which go by the clock."""
        self.admission = Admission(self._target("leader"), self.selector, self._ask, patience_s=5.0)

    def _target(self, name):
        self.ports.append(ReachablePort(HERE, self.selector))
        return Target(name, HERE, self.ports[-1].port)

    def come(self, *names):
        for name in names:
            machine = FollowingMachine(len(self.ports), b"", name, name, "", self._target(name))
            self.admission.add(machine)

    def _ask(self, machine, message):
        self.asked.append((machine, message["trial"], [name for name, *_ in message["targets"]]))

    def go(self):
        """Try those that wait, answer for all machines, and return who is present afterwards."""
        self.admission.advance(self.now, self.present, room=1000)
        asked, self.asked = self.asked, []
        for machine, trial, targets in asked:
            if machine.name == self.gone:
                self.admission.drop(machine)
            failed = {one: "why" for one in targets if {one, machine.name} in self.cut}
            self.admission.answered(machine, trial, failed)
        for _ in range(int(HANG_S / 0.01)):
            for key, _ in self.selector.select(0.01):
                key.data()
            verdicts = self.admission.advance(self.now, self.present, room=0)
            if verdicts or self.admission._trial is None:
                break
        self.present += [one.machine for one in verdicts if one.reason is None]
        self.refused |= {one.machine.name: one.reason for one in verdicts if one.reason is not None}
        return len(asked), [one.name for one in self.present]

    def close(self):
        self.admission.close()
        for one in self.ports:
            one.close()
        self.selector.close()


@pytest.fixture
def lobby():
    made = Lobby()
    yield made
    made.close()


def test_every_machine_is_asked_once_for_all_that_come_together(lobby):
    names = [f"{number}" for number in range(80)]
    lobby.come(*names[:40])
    assert lobby.go() == (40, names[:40])
    lobby.come(*names[40:])
    assert lobby.go() == (80, names)


def test_of_two_newcomers_that_do_not_reach_each_other_the_first_is_let_in(lobby):
    lobby.cut = [{"a", "b"}]
    lobby.come("a", "b", "c")
    assert lobby.go()[1] == ["a", "c"]
    lobby.now += AGAIN_S
    lobby.go()
    lobby.now += 5.0
    assert lobby.go()[1] == ["a", "c"]
    assert lobby.refused == {"b": "b does not reach a (why); a does not reach b (why)"}


def test_who_does_not_reach_one_that_is_turned_away_is_let_in(lobby):
    lobby.come("a")
    lobby.go()
    lobby.cut = [{"a", "b"}, {"b", "c"}]
    lobby.come("b", "c")
    assert lobby.go()[1] == ["a", "c"]


def test_one_that_goes_meanwhile_costs_the_others_nothing(lobby):
    lobby.come("a")
    lobby.go()
    lobby.gone, lobby.cut = "b", [{"a", "b"}, {"b", "c"}]
    lobby.come("b", "c")
    assert lobby.go()[1] == ["a", "c"]


def test_machines_of_one_name_are_tried_one_after_the_other(lobby):
    """Else nobody could tell which of them is not reached."""
    lobby.come("a", "a", "b")
    assert lobby.go() == (2, ["a", "b"])
    lobby.cut = [{"a", "b"}]
    assert lobby.go() == (3, ["a", "b"])


def test_one_that_is_silent_does_not_cost_another_the_trial_without_a_machine_that_went(lobby):
    """The silent one draws the trial out beyond the patience that lets a machine be noticed as gone."""
    lobby.come("a")
    lobby.go()
    lobby.come("b", "silent")
    lobby.admission.advance(0.0, lobby.present, room=9)
    (a, trial, _), (b, *_), _ = sorted(lobby.asked, key=lambda one: one[0].name)
    lobby.asked = []
    lobby.admission.answered(b, trial, {"a": "why"})
    lobby.present.remove(a)
    lobby.admission.drop(a)
    for key, _ in lobby.selector.select(HANG_S):
        key.data()
    lobby.now = ANSWER_S
    verdicts = lobby.admission.advance(lobby.now, [], room=9)
    assert [one.machine.name for one in verdicts] == []
    lobby.now += AGAIN_S
    assert lobby.go() == (2, ["b", "silent"])

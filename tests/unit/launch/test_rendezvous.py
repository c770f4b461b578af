"""Where machines meet, as the command line says it."""

import pytest

from paceline.errors import InputError
from paceline.launch.nodes import machines
from paceline.launch.nodes.rendezvous import Rendezvous
from paceline.world import interfaces
from paceline.world.env import SECRET


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


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        (
            "203.0.113.7",
            "--rendezvous 203.0.113.7 is another machine's address, but --nodes 1 is this one alone",
        ),
        ("no-such-host.invalid", "is another machine's address, but --nodes 1"),
    ],
)
def test_a_meeting_with_nobody_elsewhere_is_refused(endpoint, message):
    with pytest.raises(InputError, match=message):
        machines.meeting(endpoint, "1", join_timeout=1, machine_timeout=15)
    assert machines.meeting("127.0.0.1", "1", join_timeout=1, machine_timeout=15) is not None


def test_a_host_that_nobody_knows_is_named_before_a_secret_is_asked_for(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(
        InputError, match=r"no-such-host.invalid:29400 names a host that this machine does not know"
    ):
        machines.shared_secret(Rendezvous.parse("no-such-host.invalid", "2"), None)


def test_only_the_machine_with_the_address_holds_it():
    assert Rendezvous.parse("127.0.0.1", "2").is_here()
    assert not Rendezvous.parse("203.0.113.7", "2").is_here()


def test_one_that_is_told_to_lead_does_at_an_address_that_is_a_service_s(monkeypatch):
    monkeypatch.setattr(interfaces, "reaching", lambda _: interfaces.LocalEnd("10.0.0.5", "eth0"))
    told = Rendezvous.parse("203.0.113.7", "2", leads=True)
    assert told.is_here()
    assert told.bound == "10.0.0.5"


def test_a_machine_may_be_told_to_lead_or_not_to():
    patience = {"join_timeout": 5.0, "machine_timeout": 15}
    for lead, leads in ((None, True), (True, True), (False, False)):
        where = machines.meeting("127.0.0.1:29478", "2", lead=lead, **patience)
        assert where.is_here() is leads

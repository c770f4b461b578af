"""Which way out of this machine leads to another, on machines whose addresses the test has made itself."""

import json
import socket
import subprocess
import sys

import pytest

from paceline.errors import InputError
from paceline.world import interfaces
from paceline.world.interfaces import LocalEnd
from tests.netns import IP, network
from tests.patience import HANG_S

ASK = """
import json, sys
from dataclasses import astuple
from paceline.world import interfaces
hosts = sys.argv[1:]
print(json.dumps({
    "here": [host for host in hosts if interfaces.is_here(host)],
    "ends": {host: astuple(interfaces.reaching(host)) for host in hosts},
    "bind": {host: interfaces.address_to_bind(host) for host in hosts if interfaces.is_here(host)},
}))
"""


def test_the_loopback_addresses_are_here_and_on_the_loopback_interface():
    assert interfaces.is_here("127.0.0.1")
    assert interfaces.is_here("localhost")
    assert interfaces.reaching("127.0.0.1") == LocalEnd("127.0.0.1", "lo")
    assert interfaces.reaching("127.0.0.5") == LocalEnd("127.0.0.1", "lo")
    assert interfaces.interface_of("127.0.0.1") == "lo"
    assert interfaces.address_to_bind("127.0.0.1") == "127.0.0.1"


def test_a_host_that_nobody_knows_is_not_here_and_cannot_be_reached():
    assert not interfaces.is_here("nobody.invalid")
    with pytest.raises(InputError, match=r"nobody\.invalid is no host that this machine knows\. Check"):
        interfaces.reaching("nobody.invalid")


def test_an_address_of_another_machine_cannot_be_bound():
    with pytest.raises(InputError, match=r"203\.0\.113\.7 is not an address of this machine"):
        interfaces.address_to_bind("203.0.113.7")


def test_every_interface_the_kernel_names_is_real():
    names = {name for _, name in socket.if_nameindex()}
    found = interfaces.local_addresses()
    assert found["127.0.0.1"] == "lo"
    assert {name.partition(":")[0] for name in found.values()} <= names


def test_a_machine_with_two_networks_answers_with_the_interface_that_reaches_the_other():
    with network(2) as made:
        first, second = made.machines
        for command in (
            "link add side0 type bridge",
            "address add 10.88.0.5/24 dev side0",
            "address add 10.77.0.9/24 dev eth0",  # a second address of the same interface
            "link set side0 up",
            "route add default dev side0",
        ):
            second.run([IP, *command.split()]).wait(20)
        hosts = [first.address, first.address_v6, second.address, "10.77.0.9", "10.88.0.77", "8.8.8.8"]
        asked = second.run([sys.executable, "-c", ASK, *hosts], stdout=subprocess.PIPE, text=True)
        answer = json.loads(asked.communicate(timeout=HANG_S)[0])
    assert answer["here"] == [second.address, "10.77.0.9"]
    assert answer["ends"] == {
        first.address: [second.address, "eth0"],
        first.address_v6: [second.address_v6, "eth0"],
        second.address: [second.address, "eth0"],
        "10.77.0.9": ["10.77.0.9", "eth0"],
        "10.88.0.77": ["10.88.0.5", "side0"],
        "8.8.8.8": ["10.88.0.5", "side0"],
    }
    assert answer["bind"] == {second.address: second.address, "10.77.0.9": "10.77.0.9"}


def test_a_machine_that_knows_its_own_name_only_as_a_loopback_address_gives_the_one_others_use():
    name = socket.gethostname()
    if not all(interfaces.is_loopback(address) for address in interfaces.resolve(name) or ["none"]):
        pytest.skip(f"{name} is {interfaces.resolve(name)} here")
    with network(1) as made:
        (machine,) = made.machines
        asked = machine.run([sys.executable, "-c", ASK, name], stdout=subprocess.PIPE, text=True)
        answer = json.loads(asked.communicate(timeout=HANG_S)[0])
    assert answer == {
        "here": [name],
        "ends": {name: [machine.address, "eth0"]},
        "bind": {name: "0.0.0.0"},  # noqa: S104
    }

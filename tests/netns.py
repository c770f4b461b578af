"""Machines for tests: network namespaces that are joined by a bridge, each with an address of its own.

The bridge lives in a namespace too, so the network of the machine that runs the tests is never touched.
Cutting a machine off takes the bridge's port to it down: packets vanish, and nobody is told.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.patience import HANG_S

PREFIX = "paceline"
IP = shutil.which("ip") or "ip"
_serial = itertools.count()


@dataclass
class Machine:
    """One machine: a namespace with an interface `eth0`."""

    name: str
    index: int
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Its IPv4 address."""
        return f"10.77.0.{self.index + 1}"

    @property
    def address_v6(self) -> str:
        """Its IPv6 address."""
        return f"fd77::{self.index + 1:x}"

    def run(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command there; it is killed when the network goes, if it still runs."""
        process = subprocess.Popen([IP, "netns", "exec", self.name, *command], **options)
        self.started.append(process)
        return process

    def pids(self) -> list[int]:
        """Give every process that runs there."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Kill all that runs there at once, as a power cut would."""
        # Frozen first: what is left of a family must not see the others die and say goodbye.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        for process in self.started:
            process.wait(HANG_S)

    def end(self) -> None:
        """Kill what is left and close what was held open."""
        self.kill()
        for process in self.started:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@dataclass
class Network:
    """Machines and the bridge between them."""

    switch: str
    machines: list[Machine]

    def cut(self, machine: Machine) -> None:
        """Take the machine off the network without a word to anybody."""
        _ip("-n", self.switch, "link", "set", f"port{machine.index}", "down")

    def heal(self, machine: Machine) -> None:
        """Put it back."""
        _ip("-n", self.switch, "link", "set", f"port{machine.index}", "up")


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """Make `count` machines on one network, and remove them and all they run in the end."""
    _sweep()
    name = f"{PREFIX}-{os.getpid()}-{next(_serial)}"
    made = Network(f"{name}-switch", [Machine(f"{name}-machine{index}", index) for index in range(count)])
    try:
        _lay(made)
        yield made
    finally:
        present = _namespaces()
        for machine in made.machines:
            if machine.name in present:
                machine.end()
        for namespace in (made.switch, *(machine.name for machine in made.machines)):
            if namespace in present:
                _ip("netns", "delete", namespace)


def _lay(made: Network) -> None:
    try:
        _ip("netns", "add", made.switch)
        _ip("-n", made.switch, "link", "add", "bridge0", "type", "bridge")
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"no network namespaces here: {words.strip()}")
    _ip("-n", made.switch, "link", "set", "bridge0", "up")
    for machine in made.machines:
        port = f"port{machine.index}"
        _ip("netns", "add", machine.name)
        _ip(
            "-n",
            made.switch,
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            machine.name,
        )
        _ip("-n", made.switch, "link", "set", port, "master", "bridge0", "up")
        _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "eth0")
        _ip("-n", machine.name, "address", "add", f"{machine.address_v6}/64", "dev", "eth0", "nodad")
        _ip("-n", machine.name, "link", "set", "lo", "up")
        _ip("-n", machine.name, "link", "set", "eth0", "up")


def _sweep() -> None:
    """Remove what a test process that was killed has left: a name carries the id of the process that made it."""
    for namespace in _namespaces():
        parts = namespace.split("-")
        if (
            parts[0] == PREFIX
            and parts[1:2]
            and parts[1].isdecimal()
            and not Path("/proc", parts[1]).exists()
        ):
            _ip("netns", "delete", namespace)


def _namespaces() -> list[str]:
    try:
        return os.listdir("/run/netns")  # noqa: PTH208
    except FileNotFoundError:
        return []


def _ip(*arguments: str) -> str:
    done = subprocess.run([IP, *arguments], check=True, capture_output=True, text=True, timeout=HANG_S)
    return done.stdout

"""Starts a command on several machines over ssh: each runs paceline's own launcher, and the first of them leads.

What passes between this process and the machines is in `relay`.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from paceline.errors import InputError
from paceline.launch.clusters import relay
from paceline.launch.clusters.commands import Command
from paceline.launch.nodes.rendezvous import DEFAULT_PORT
from paceline.training.options import RunOptions
from paceline.transport.addresses import at
from paceline.world import env, interfaces

GOODBYE_S, END_S, NEVER_HERE_S = 10.0, 40.0, 1.0
"""How long the others may take to end by themselves when the leader has, then when they are told to, and an ssh that never got
through."""
_SSH = ("-T", "-oBatchMode=yes", "-oConnectTimeout=20", "-oServerAliveInterval=15")
_HOST = re.compile(r"(?:[\w.][\w.-]*@)?[\w.:][\w.:%-]*")


def named(hosts: str) -> list[str]:
    """Return the machines that `--hosts` names."""
    found = [one.strip() for one in hosts.split(",")]
    wrong = next((one for one in found if _HOST.fullmatch(one) is None), None)
    if wrong is not None:
        raise InputError(f"--hosts {hosts!r}: {wrong!r} is no host. Give names or addresses, like a,b,me@c.")
    if len(set(found)) < len(found):
        raise InputError(f"--hosts {hosts!r} names a machine twice. Use --workers for more than one on each.")
    return found


def meeting(hosts: str | None) -> dict[str, str]:
    """Return what `--hosts` says of the machines, by the names of options: how many, and where they meet."""
    if hosts is None:
        return {}
    found = named(hosts)
    return {"nodes": str(len(found)), "rendezvous": at(found[0].rpartition("@")[2], DEFAULT_PORT)}


class Ssh:
    """The machines of `--hosts`, reached with the command of `--ssh`; one that is this machine is started without."""

    def __init__(self, hosts: str, ssh: str) -> None:
        self._hosts = named(hosts)
        try:
            self._ssh = shlex.split(ssh)
        except ValueError as error:
            raise InputError(f"--ssh {ssh!r} is no command: {error}.") from None
        if not self._ssh:
            raise InputError("--ssh is empty. Leave it out, or give a command, like 'ssh -p 2222'.")

    def commands(self, options: RunOptions, arguments: Sequence[str]) -> tuple[Command, ...]:
        """Return the command for each machine, the leading one first."""
        if options.max_nodes != len(self._hosts):
            raise InputError(
                f"--nodes is {options.nodes}, but --hosts names {len(self._hosts)} machines. Leave --nodes out."
            )
        return tuple(
            Command(
                host,
                self._words(
                    host, relay.arguments(arguments, options, options.rendezvous, lead=host == self._hosts[0])
                ),
            )
            for host in self._hosts
        )

    def _words(self, host: str, arguments: Sequence[str]) -> tuple[str, ...]:
        run = (sys.executable, "-m", relay.MODULE, *arguments)
        if "@" not in host and interfaces.is_here(host):
            return run
        path = env.read("PYTHONPATH")
        found = (*(("env", f"PYTHONPATH={path}") if path else ()), *run)
        there = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(found)}"
        return (*self._ssh, *_SSH, host, there)

    def start(self, options: RunOptions, arguments: Sequence[str]) -> int:
        """Start the machines, show what they say, and return the leader's exit status when all have ended."""
        commands = self.commands(options, arguments)
        told = relay.variables(options, "CUDA_")
        started: list[_Machine] = []
        try:
            for command in commands:
                started.append(_Machine.start(command, told, leads=not started))  # one by one: each is ended
            return _MachineWatch(started).run()
        except FileNotFoundError as error:
            raise InputError(
                f"{error.filename} is not installed here. Install ssh, or name one with --ssh."
            ) from None
        finally:
            _end(started)


@dataclass
class _Machine:
    """One machine, as its ssh shows it."""

    name: str
    leads: bool
    process: subprocess.Popen[bytes]
    here: bool = False
    """Whether the command runs there."""
    rests: dict[int, bytes] = field(default_factory=dict)
    """The beginnings of lines, by stream."""

    @classmethod
    def start(cls, command: Command, told: Mapping[str, str], *, leads: bool) -> _Machine:
        """Start its command in a session of its own, where Ctrl-C does not reach it."""
        errors = None if leads else subprocess.PIPE
        process = relay.start(command.words, told, stderr=errors, start_new_session=True)
        return cls(command.machine, leads, process)

    def hang_up(self) -> None:
        """Notify it that nobody waits for it."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def streams(self) -> list[IO[bytes]]:
        """Return what can be read of it."""
        return [one for one in (self.process.stdout, self.process.stderr) if one is not None]

    def take(self, stream: IO[bytes], chunk: bytes) -> None:
        """Show what it says: the leader as if it were this process, the others line by line behind their names."""
        if self.leads and self.here:
            relay.show(sys.stdout, chunk)
            return
        *lines, rest = (self.rests.pop(stream.fileno(), b"") + chunk).split(b"\n")
        for place, line in enumerate(lines):
            if not self.here and stream is self.process.stdout and line.strip() == relay.HERE:
                self.here = True
                if self.leads:
                    relay.show(sys.stdout, b"\n".join([*lines[place + 1 :], rest]))
                    return
            else:
                relay.show(sys.stderr, f"{self.name}: ".encode() + line + b"\n")
        self.rests[stream.fileno()] = rest

    def finish(self, stream: IO[bytes]) -> None:
        """Show the line that it has not ended."""
        if rest := self.rests.pop(stream.fileno(), b""):
            self.take(stream, rest + b"\n")


class _MachineWatch:
    """All machines, until the leader has ended and the others with it."""

    def __init__(self, started: Sequence[_Machine]) -> None:
        self._machines = started
        self._leader = started[0]

    def run(self) -> int:
        """Return the leader's exit status; raise InputError where a machine could not be started."""
        with selectors.DefaultSelector() as selector, relay.signals_go_to(self._pass_on):
            for one in self._machines:
                for stream in one.streams():
                    selector.register(stream, selectors.EVENT_READ, one)
            self._read(selector, lambda: self._leader.process.stdout in _open(selector))
            # They are told by the leader; what they still say is shown.
            by = time.monotonic() + GOODBYE_S
            self._read(selector, lambda: _are_here(selector) and time.monotonic() < by)
        return relay.status(self._leader.process)

    def _read(self, selector: selectors.BaseSelector, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            for key, _ in selector.select(0.5):
                stream: Any = key.fileobj
                chunk = stream.read(1 << 16)
                if chunk:
                    key.data.take(stream, chunk)
                    continue
                key.data.finish(stream)
                selector.unregister(stream)
                if not key.data.here and stream is key.data.process.stdout:
                    raise _unstarted(key.data)

    def _pass_on(self, number: int) -> None:
        relay.send(self._leader.process, str(number))


def _open(selector: selectors.BaseSelector) -> list[Any]:
    return [key.fileobj for key in selector.get_map().values()]


def _are_here(selector: selectors.BaseSelector) -> bool:
    """Return whether machines that can be read are there; an ssh that has not got through says nothing more."""
    return any(key.data.here for key in selector.get_map().values())


def _unstarted(one: _Machine) -> InputError:
    if one.process.stderr is not None:
        one.take(one.process.stderr, one.process.stderr.read())
        one.finish(one.process.stderr)
    return InputError(
        f"the command could not be started on {one.name} (exit status {relay.status(one.process)}). "
        f"Check that `ssh {one.name} true` works without a password, and that {sys.executable} and {Path.cwd()} are there, too."
    )


def _end(started: Sequence[_Machine]) -> None:
    """End what still runs: first by hanging up, which the other side understands, then by ending ssh."""
    for one in started:
        one.hang_up()
    told = time.monotonic()
    for one in sorted(started, key=lambda machine: machine.here):
        by = told + (END_S if one.here else NEVER_HERE_S)
        try:
            one.process.wait(max(0.1, by - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        for stream in one.streams():
            stream.close()

"""`--hosts`: a run on machines that are reached over a real ssh, and what becomes of them when one end of it is lost."""

import contextlib
import getpass
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault.machines import COMMAND, SECRET, with_secret
from tests.patience import HANG_S
from tests.sshd import needs_sshd, sshd

pytestmark = needs_sshd


@pytest.fixture
def ssh(trial, tmp_path):
    """The ssh from the second machine to the first."""
    (tmp_path / "keys").mkdir()
    first, _ = trial.net.machines
    with sshd(tmp_path / "keys", first.address, first.run) as command:
        yield command


class Command:
    """`paceline train --hosts` on the second machine; the first one, which leads, is reached over ssh."""

    def __init__(self, trial, ssh, *more):
        self.trial = trial
        self.first, self.second = trial.net.machines
        hosts = f"{self.first.address},{self.second.address}"
        options = ("--workers", "1", "--shards", "4", "--out", "run", "--machine-timeout", "4", "--ssh", ssh)
        self.words = [*COMMAND, "--hosts", hosts, *options, *more]
        self.err = trial.folder / "err"
        with self.err.open("wb") as errors:
            self.process = self.second.run(
                self.words,
                cwd=trial.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=with_secret(),
            )
        self.trial.wait_until(lambda: self.trial.steps() >= 2 or self.process.poll() is not None)
        assert self.process.poll() is None, self.err.read_text()

    def commands(self, machine):
        """Give the command lines of all that runs on a machine, by process id."""
        found = {}
        for pid in machine.pids():
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return found

    def leader(self):
        """Give the launcher that leads."""
        started = "-m paceline.cli.remote_end train"
        (pid,) = [
            pid
            for pid, words in self.commands(self.first).items()
            if started in words and words.startswith(sys.executable)
        ]
        return pid

    def workers(self):
        """Give the processes of the run: all of both machines but sshd and this command's own."""
        own = {self.first.started[0].pid, self.process.pid}
        return {pid for machine in (self.first, self.second) for pid in machine.pids()} - own


def test_two_machines_come_to_the_bits_of_one_and_the_secret_is_in_no_command(trial, ssh, bits):
    command = Command(trial, ssh)
    assert sorted(set(trial.places())) == [0, 1]
    lines = {**command.commands(command.first), **command.commands(command.second)}
    assert lines[command.leader()].endswith("--lead ")
    assert not [words for words in lines.values() if SECRET in words]
    trial.hurry()
    out, _ = command.process.communicate(timeout=HANG_S)
    assert command.process.returncode == 0, command.err.read_text()
    (line,) = out.splitlines()
    told = json.loads(line)
    assert (told["workers"], told["weights_sha256"], told["recoveries"]) == (2, bits, [])
    assert f"{command.second.address}: " in command.err.read_text()


def test_ctrl_c_saves_and_leaves_and_a_killed_command_leaves_nobody_behind(trial, ssh):
    command = Command(trial, ssh)
    os.kill(command.process.pid, signal.SIGINT)
    command.process.communicate(timeout=HANG_S)
    assert command.process.returncode == 130, command.err.read_text()
    assert "The newest checkpoint is of step " in command.err.read_text()
    again = Command(trial, ssh, "--resume")
    os.kill(again.process.pid, signal.SIGKILL)
    again.process.wait(HANG_S)
    trial.wait_until(lambda: not again.workers())


def test_a_leader_that_is_killed_ends_the_others(trial, ssh):
    command = Command(trial, ssh)
    os.kill(command.leader(), signal.SIGKILL)
    command.process.communicate(timeout=HANG_S)
    assert command.process.returncode not in (0, None)
    trial.wait_until(lambda: not command.workers())


def test_a_machine_where_it_cannot_be_started_ends_the_command(trial, ssh):
    machine = trial.net.machines[1]
    hosts = f"{machine.address},{trial.net.machines[0].address}"
    words = [*COMMAND, "--hosts", hosts, "--ssh", f"{ssh} -p 2223", "--out", "run"]
    ended = machine.run(words, cwd=trial.folder, stderr=subprocess.PIPE, text=True)
    _, said = ended.communicate(timeout=HANG_S)
    assert ended.returncode == 2
    assert "Connection refused" in said
    assert said.splitlines()[-1].startswith(
        "error: the command could not be started on 10.77.0.1 (exit status 255)."
    )


def test_one_machine_on_loopback(tmp_path):
    keys = tmp_path / "keys"
    keys.mkdir()
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, meeting = one.getsockname()[1], other.getsockname()[1]
    with sshd(keys, "127.0.0.1", subprocess.Popen, port) as ssh:
        command = ["-m", "paceline", "train", "dense4096", "--steps", "2", "--json", "--out", "run"]
        command += ["--rendezvous", f"127.0.0.1:{meeting}"]
        ended = subprocess.run(
            [
                sys.executable,
                *command,
                "--hosts",
                f"{getpass.getuser()}@127.0.0.1",
                "--ssh",
                ssh,
                "--rendezvous",
                f"127.0.0.1:{meeting}",
            ],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["steps"] == 2

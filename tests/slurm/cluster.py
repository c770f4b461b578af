"""A SLURM in one folder, of this machine or of several that are network namespaces.

It has its own munge key and socket, its own configuration, and ports that were free.
Nothing outside the folder is written: no service is registered, /etc is left alone, and `SLURM_CONF` is all that a command
needs to find it. What runs in it are munged, slurmctld and slurmd as children of whoever started it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.netns import Machine
from tests.patience import HANG_S

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
"""Debian's packages that have what is needed."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "squeue", "scontrol")
CORES = 8
"""How many the node says it has: jobs of two and four tasks run on two cores, too."""
_AS_NODE = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'
"""In namespaces of its own: nobody else sees that name or that file."""


@dataclass
class Cluster:
    """One that runs."""

    folder: Path
    machines: tuple[Machine, ...] = ()
    """The nodes, where these are network namespaces; else this machine is the only one."""
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def configuration(self) -> Path:
        """What SLURM's commands and daemons read."""
        return self.folder / "slurm.conf"

    def environment(self) -> dict[str, str]:
        """Return the variables for a command that is to use it."""
        return {"SLURM_CONF": str(self.configuration)}

    def run(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command that uses it."""
        merged = {**os.environ, **self.environment(), **options.pop("env", {})}
        within = _inside(self.machines[0]) if self.machines else ()
        return subprocess.run(
            (*within, *command),
            env=merged,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
            **options,
        )

    def nodes(self) -> dict[str, str]:
        """Return the names of the nodes and their addresses."""
        if not self.machines:
            return {socket.gethostname().partition(".")[0]: "127.0.0.1"}
        return {f"node{one.index + 1}": one.address for one in self.machines}

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING."""
        return self.run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").stdout.strip()


def missing() -> str:
    """Return why there can be no SLURM here; nothing where there can."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"SLURM is not installed here ({', '.join(absent)}): `python -m tests.slurm --install` does so"
    return (
        "" if os.geteuid() == 0 else "slurmd starts jobs of other users, so this SLURM is run by root alone"
    )


def install() -> None:
    """Install Debian's packages; where systemd runs, it starts their services, which are not used."""
    apt = shutil.which("apt-get")
    if apt is None:
        raise SystemExit(
            "there is no apt-get here: install slurmctld, slurmd, SLURM's commands and munge by other means"
        )
    options = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run([apt, "update", "-qq"], check=True, env=options)
    subprocess.run(
        [apt, "install", "-y", "-qq", "--no-install-recommends", *PACKAGES], check=True, env=options
    )


@contextlib.contextmanager
def cluster(machines: Sequence[Machine] = ()) -> Iterator[Cluster]:
    """Start a SLURM and take it away with everything it runs."""
    made = Cluster(Path(tempfile.mkdtemp(prefix="paceline-slurm-")), tuple(machines))
    try:
        _start(made)
        yield made
    finally:
        _stop(made)
        shutil.rmtree(made.folder, ignore_errors=True)


def _start(made: Cluster) -> None:
    key, munge = made.folder / "munge.key", made.folder / "munge"
    munge.mkdir(mode=0o755)
    made.folder.chmod(0o755)
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = {"key": key, **{name: munge / name for name in ("socket", "pid", "log", "seed")}}
    named = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in files.items()]
    _launch(made, ["munged", "--foreground", "--force", *named])
    _wait(made, files["socket"].exists)
    made.configuration.write_text(_configuration(made, files["socket"]))
    configuration = ["-D", "-f", str(made.configuration)]
    _launch(made, ["slurmctld", *configuration])
    for place in range(len(made.nodes())):
        _launch(made, ["slurmd", *configuration], place)
    _wait(
        made,
        lambda: (
            made.run("sinfo", "--noheader", "--format=%T %D").stdout.split()
            == ["idle", str(len(made.nodes()))]
        ),
    )


def _configuration(made: Cluster, munge: Path) -> str:
    folder, (first, *_) = made.folder, made.nodes().items()
    controller, node = _free_ports(2)
    for name in ("state", *(f"spool-{name}" for name in made.nodes())):
        (folder / name).mkdir()
    lines: dict[str, object] = {
        "ClusterName": "paceline",
        "SlurmctldHost": f"{first[0]}({first[1]})",
        "SlurmUser": "root",
        "SlurmctldPort": controller,
        "SlurmdPort": node,
        "AuthType": "auth/munge",
        # A job that is queued again waits until its credential has expired.
        "AuthInfo": f"socket={munge},cred_expire=5",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool-%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd-%n.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd-%n.log",
        "PlugStackConfig": folder / "plugstack.conf",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",
        "MailProg": "/bin/true",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "KillWait": 30,
        "SchedulerParameters": "sched_interval=1,batch_sched_delay=0,sched_min_interval=100000",
    }
    text = [f"{key}={value}" for key, value in lines.items()]
    text += [f"NodeName={name} NodeAddr={at} CPUs={CORES} State=UNKNOWN" for name, at in made.nodes().items()]
    return "\n".join([*text, "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP", ""])


def _launch(made: Cluster, command: list[str], place: int = 0) -> None:
    """Start a daemon, where the nodes are namespaces on one of them, with a name and a hosts file of its own."""
    program = _program(command[0])
    assert program is not None, command[0]
    within = ["setpriv", "--pdeathsig", "TERM"]  # nobody is left to end it where this process is killed
    if made.machines:
        hosts = made.folder / "hosts"
        hosts.write_text(
            "".join(f"{at} {name}\n" for name, at in {"localhost": "127.0.0.1", **made.nodes()}.items())
        )
        there = [*_inside(made.machines[place]), "unshare", "--uts", "--mount", "sh", "-ec", _AS_NODE]
        within += [*there, list(made.nodes())[place], str(hosts)]
    with (made.folder / f"{command[0]}-{place}.out").open("wb") as output:
        made.started.append(
            subprocess.Popen(
                [*within, program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **made.environment()},
            )
        )


def _inside(machine: Machine) -> tuple[str, ...]:
    """Return how a command is run in a namespace; `ip netns exec` would hide the control groups, which slurmd wants to see."""
    return "nsenter", f"--net=/run/netns/{machine.name}"


def _stop(made: Cluster) -> None:
    """End the jobs, then the daemons in the reverse order of their start, by their process ids."""
    if len(made.started) == 2 + len(made.nodes()):
        with contextlib.suppress(subprocess.TimeoutExpired):
            made.run("scancel", "--signal=KILL", "--full", "--user=root")
            made.run("scancel", "--user=root")
            deadline = time.monotonic() + 20
            while made.run("squeue", "--noheader").stdout.strip() and time.monotonic() < deadline:
                time.sleep(0.2)
    for process in reversed(made.started):
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(made: Cluster, condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        dead = [one for one in made.started if one.poll() is not None]
        if dead or time.monotonic() > deadline:
            logs = "\n".join(
                path.read_text() for path in [*made.folder.glob("*.out"), *made.folder.glob("*.log")]
            )
            raise RuntimeError(f"SLURM does not come up in {made.folder}:\n{logs}")
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _program(name: str) -> str | None:
    """Find a program; daemons are where an ordinary user's PATH does not lead."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")

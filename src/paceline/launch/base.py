"""The contract of a launcher: what it is given, what it plans, and what came of it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import DiskFaultError, InputError, WorkerFailedError
from paceline.launch.code_errors import CodeError
from paceline.launch.failures import WorkerFailure
from paceline.launch.job import Call, Job
from paceline.launch.nodes.rendezvous import Rendezvous
from paceline.launch.policy import Policy
from paceline.launch.worker_output import WorkerOutput
from paceline.launch.workers.process_limit import check_process_limit
from paceline.option_fields import Options, ranged, required
from paceline.ranges import PORT, SECONDS, THREADS, WORKERS
from paceline.training.options import RunOptions
from paceline.transport.secret import Secret


@dataclass(frozen=True, kw_only=True)
class LaunchSpec(Options):
    """What is to run, and on how many workers."""

    call: Call
    workers: int = required(WORKERS)
    threads: int | None = ranged(None, THREADS)
    """Threads of each worker; None shares the cores out evenly."""
    out: Path | None = None
    """The run folder; None keeps the logs in a temporary one that goes away when all is well."""
    arguments: list[str] = field(default_factory=list)
    """`sys.argv` of the workers."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the launcher's own environment."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables in place of those that say who a worker is."""
    output: WorkerOutput | None = None
    """Whose output is shown; None shows rank 0's."""
    master_port: int = ranged(0, PORT)
    """The port at which a script's ranks meet; 0 takes a free one."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """More of them, which workers on other machines have as they are at the machine that leads."""
    modules: tuple[str, ...] = ()
    """What all workers will import, and so is imported once for them."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """What goes into the run folder's spec.json."""
    policy: Policy | None = None
    """What may be done about a lost worker; None ends the launch with the first."""
    grace: float = ranged(RunOptions.grace, SECONDS)
    """Seconds from SIGTERM to the end."""
    rendezvous: Rendezvous | None = None
    """Where this machine meets others; None keeps to this machine."""
    agreed: Mapping[str, str] = field(default_factory=dict)
    """What must be the same on all of them, by the names that the user knows."""
    secret_file: str | None = None
    """Where the secret is that they share; None looks into the environment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_process_limit(self.workers, self.threads or 1)


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Exactly what would be started: it can be printed before anything is."""

    launcher: str
    jobs: tuple[Job, ...]
    out: Path | None
    policy: Policy
    record: Mapping[str, Any] = field(default_factory=dict)
    grace: float = RunOptions.grace
    output: WorkerOutput | None = None
    master_port: int = 0
    rendezvous: Rendezvous | None = None
    agreed: Mapping[str, str] = field(default_factory=dict)
    secret: Secret | None = None
    """What the machines of the run share; None where there is one machine."""
    invitation: str = field(default="", repr=False)
    """The command for the other machines, where the secret was made here."""

    @property
    def address(self) -> str:
        """Where the workers of this machine meet."""
        return self.jobs[0].identity.master_address

    def describe(self) -> str:
        """Return one line per worker."""
        count = self.policy.workers
        lines = [f"{self.launcher}: {count} worker(s), {self.jobs[0].threads} thread(s) each"]
        if self.policy.trains:
            lines[0] += f", {self.policy.shards} shard(s)"
        if self.rendezvous is not None:
            part = "leads" if self.rendezvous.is_here() else "follows"
            lines[0] += f"; {self.rendezvous.nodes} machines at {self.rendezvous.endpoint}, this one {part}"
        lines += [
            f"  rank {job.identity.rank} of {job.identity.size}: {' '.join(job.arguments)}"
            for job in self.jobs
        ]
        if count > len(self.jobs):
            lines += ["  the other ranks have been started already, each by itself"]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a launch ended."""

    results: tuple[Any, ...]
    """What each rank returned, by rank; those that were lost are left out."""
    failure: WorkerFailure | None = None
    errors: tuple[CodeError, ...] = ()
    """Where the user's own code failed and was tried once more."""
    restarts: int = 0
    """How many workers were started in place of lost ones."""
    interrupted: int | None = None
    """The signal that asked for the end, if one did."""
    at_once: bool = False
    """Whether the workers were ended at once, and not after a step."""
    saved_at: int | None = None
    """The step of the checkpoint that such an end left, where it left one."""
    lost: tuple[int, ...] = ()
    """The ranks that were lost on the way, where the others could do without them."""
    led_by: str | None = None
    """The machine that has the results, where that is another one."""

    @property
    def status(self) -> int:
        """Return the exit status of a command that ends with this outcome."""
        if self.interrupted is not None:
            return 128 + self.interrupted
        return self.failure.status if self.failure else 0

    @property
    def farewell(self) -> str:
        """Return what to say where a signal has ended it."""
        saved = self.saved_at
        left = (
            ""
            if saved is None
            else f" The newest checkpoint is of step {saved}; --resume goes on from there."
        )
        return f"interrupted: all workers have ended.{left}"

    def value(self) -> tuple[Any, ...]:
        """Return the results, or raise what went wrong; SIGTERM ends this process, with the status of the commands."""
        __tracebackhide__ = True
        if self.interrupted == signal.SIGTERM:
            raise SystemExit(self.status)
        if self.interrupted is not None:
            raise KeyboardInterrupt
        if self.failure is None:
            return self.results
        if self.failure.kind == "input":
            raise InputError(self.failure.message)
        if self.failure.kind == "disk":
            raise DiskFaultError(self.failure.message)
        failure = self.failure
        raise WorkerFailedError(failure.rank, failure.host, failure.cause(), failure.trace)


class Launcher(Protocol):
    """One way in which workers come to be."""

    name: str

    def detect(self) -> bool:
        """Return whether this launcher is the one for this process."""

    def adopt(self, options: RunOptions) -> RunOptions:
        """Return the options, with what the world that is there already decides."""

    def ask(self, call: Call) -> Any:
        """Return what a call returns in a process that joins no group, or raise what went wrong."""

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """Return what would be started, and start nothing."""

    def launch(self, plan: LaunchPlan) -> Outcome:
        """Start it, and stay until it has ended."""

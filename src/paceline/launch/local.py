"""Starts the workers of this machine from the fork server and supervises them; leads other machines, or follows one."""

from __future__ import annotations

import resource
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from paceline.errors import InputError
from paceline.launch.base import LaunchPlan, LaunchSpec, Outcome
from paceline.launch.console import Console
from paceline.launch.failures import WorkerFailure
from paceline.launch.job import Call, Job
from paceline.launch.nodes import machines
from paceline.launch.nodes.follower import Follower
from paceline.launch.policy import Policy
from paceline.launch.run_folder import RunFolder
from paceline.launch.supervisor import Supervisor
from paceline.launch.workers import fork_server as forkserver
from paceline.launch.workers.process_limit import crowded
from paceline.observe import JsonlSink, RunFailed
from paceline.training.folder import EVENTS
from paceline.training.options import RunOptions
from paceline.training.task_folder import Neighbours
from paceline.world import env, interfaces
from paceline.world.env import Identity


class LocalLauncher:
    """Workers on this machine, forked from a process that has torch loaded."""

    name = "local"

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()

    def detect(self) -> bool:
        """Return whether nobody else has started this process as a worker."""
        return env.identity() is None

    def adopt(self, options: RunOptions) -> RunOptions:
        """Leave them as they are: this launcher makes the world, though none of MPI's."""
        if options.backend == "mpi" and options.processes > 1:
            raise InputError(
                f"--backend mpi needs workers that MPI has started. Use mpirun -n {options.processes} for this command."
            )
        return options

    def ask(self, call: Call) -> Any:
        """Make the call in a worker of its own, silently."""
        quiet = LocalLauncher(_Silence())
        outcome = quiet.launch(quiet.plan(LaunchSpec(call=call, workers=1, threads=1)))
        return outcome.value()[0]

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """Lay out one job per worker; ranks and the store's port are filled in when they start."""
        threads = spec.threads or max(1, env.cores() // spec.workers)
        secret, invitation = machines.shared_secret(spec.rendezvous, spec.secret_file)
        # Workers of several machines know each other by the secret of the machines.
        shared = {name: value for name, value in spec.shared.items() if secret is None or name != env.SECRET}
        environment = {**env.snapshot(), **spec.environment, **shared}
        if secret is not None:
            environment[env.SECRET] = secret.text
        address = env.LOOPBACK
        if spec.rendezvous is not None:
            own = interfaces.reaching(spec.rendezvous.host)
            address = own.address
            environment.setdefault("GLOO_SOCKET_IFNAME", own.interface)
        if spec.workers > 1:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        neighbours = Neighbours.here()
        jobs = tuple(
            Job(
                identity=Identity(
                    rank=rank,
                    size=spec.workers,
                    local_rank=rank,
                    local_size=spec.workers,
                    node_rank=0,
                    nodes=1,
                    master_address=address,
                    master_port=0,
                ),
                call=spec.call,
                threads=threads,
                environment=environment,
                folder=env.working_folder(),
                search_path=forkserver.search_path(),
                neighbours=neighbours,
                arguments=spec.arguments or list(sys.argv),
                modules=spec.modules,
                shared=shared,
                variables=spec.variables,
            )
            for rank in range(spec.workers)
        )
        policy = spec.policy or Policy(workers=spec.workers, shards=spec.workers, elastic=False)
        return LaunchPlan(
            launcher=self.name,
            jobs=jobs,
            out=spec.out,
            record=spec.record,
            policy=policy,
            grace=spec.grace,
            output=spec.output,
            master_port=spec.master_port,
            rendezvous=spec.rendezvous,
            agreed=spec.agreed,
            secret=secret,
            invitation=invitation,
        )

    def launch(self, plan: LaunchPlan) -> Outcome:
        """Start the store and the workers, and supervise them until the last one has ended."""
        _allow_many_files()
        if plan.rendezvous is not None and not plan.rendezvous.is_here():
            return self._follow(plan)
        self._say_crowded(plan)
        with RunFolder(plan.out, plan.record) as folder:
            self._console.open()
            try:
                with closing(Supervisor(plan, folder.path, self._console)) as supervisor:
                    outcome = supervisor.run()
            finally:
                self._console.close()
            folder.finish(outcome)
            if plan.out is not None and outcome.failure is not None and outcome.failure.kind != "input":
                _record_failure(plan.out, outcome.failure)
        return outcome

    def _follow(self, plan: LaunchPlan) -> Outcome:
        """Lend the workers of this machine to the one that leads; the run folder may be that one's too."""
        self._say_crowded(plan)
        with RunFolder(plan.out, plan.record, shared=True) as folder:
            self._console.open()
            try:
                with closing(Follower(plan, folder.path, self._console)) as follower:
                    return follower.run()
            finally:
                self._console.close()

    def _say_crowded(self, plan: LaunchPlan) -> None:
        text = crowded(len(plan.jobs))
        if text is not None:
            self._console.output("err", f"note: {text}\n".encode())


class _Silence(Console):
    """Shows nothing of what a worker writes."""

    def output(self, stream: str, chunk: bytes) -> None:
        """Drop it."""


def _allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may: each worker takes six, and strangers may open connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _record_failure(out: Path, failure: WorkerFailure) -> None:
    """Close the run's events with what ended it: the workers that would have are gone."""
    sink = JsonlSink(out / EVENTS)
    sink.emit(RunFailed(rank=failure.rank, host=failure.host, reason=failure.message))
    sink.close()

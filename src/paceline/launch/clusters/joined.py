"""Joins a world that somebody else has started: torchrun, `python -m torch.distributed.launch`, `paceline run`."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline import strategies
from paceline.compat.gloo_threads import let_gloo_rest
from paceline.errors import InputError, WorkerFailedError
from paceline.launch.base import LaunchPlan, LaunchSpec, Outcome
from paceline.launch.control import in_progress, owned
from paceline.launch.job import Call, Job
from paceline.launch.policy import Policy
from paceline.launch.run_folder import claim
from paceline.launch.workers import fork_server as forkserver
from paceline.training import folder
from paceline.training.options import RunOptions
from paceline.training.script import main_preserved
from paceline.world import env
from paceline.world.env import Identity

_calls = itertools.count()
_call = 0


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Leave this process as it was: what a script does by itself after a launch has the bits that it would have without."""
    from paceline.world import determinism, join, seeds

    with (
        join.interface_preserved(),
        determinism.preserved(),
        seeds.preserved(),
        join.device_preserved(),
        main_preserved(),
    ):
        yield


def count_call() -> None:
    """Count a call that may join this process's world.

    The number is part of where the ranks meet, so that no call meets what another has left there. All ranks make the same calls;
    a process that is started over begins at 0 again, as the others do then: torchrun and `paceline run` start all of them over,
    and serve them another store.
    """
    global _call  # noqa: PLW0603  (one process, one call at a time)
    _call = next(_calls)


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Tell the other ranks of this process's world where a call ends by an exception: they would wait for this one."""
    try:
        yield
    except BaseException as error:
        identity = env.identity()
        if identity is not None and identity.size > 1:
            from paceline.world.presence import Presence

            Presence(replace(identity, launch=_call)).leave(error)
        raise


class JoinedLauncher:
    """This very process is one of the workers already."""

    name = "joined"
    starter = "torchrun, or whatever else has set RANK"
    """Who has started the workers, in words."""

    def detect(self) -> bool:
        """Look for the variables that tell a worker who it is."""
        return env.identity() is not None

    def check(self, rendezvous: str | None) -> None:
        """Refuse to meet other machines: whoever started these workers has seen to that."""
        if rendezvous is not None:
            raise InputError(
                "--rendezvous is for machines that meet by themselves, but these workers have been started already. Leave it out."
            )

    def adopt(self, options: RunOptions) -> RunOptions:
        """Set the number of workers to the size of the world that was started outside."""
        self.check(options.rendezvous)
        identity = env.identity()
        size = 1 if identity is None else identity.size
        if options.processes != size and strategies.entry(options.strategy).processes == 1:
            raise InputError(
                f"--strategy {options.strategy} is one process, but {size} were launched. Use ddp."
            )
        return (
            options
            if strategies.entry(options.strategy).threaded
            else replace(options, workers=size - options.total_servers)
        )

    def ask(self, call: Call) -> Any:
        """Make the call here: this process is a worker."""
        from paceline.compat import dynamo
        from paceline.launch.workers.context import Worker

        dynamo.install()
        identity = env.identity()
        with _as_before():
            return None if identity is None else call(Worker(identity=identity))

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """There is one job: this process's."""
        identity = env.identity()
        if identity is None:
            raise InputError("RANK and WORLD_SIZE are not set, so there is no world to join.")
        job = Job(
            identity=replace(identity, launch=_call),
            call=spec.call,
            threads=spec.threads or max(1, env.cores() // identity.local_size),
            environment={},
            folder=env.working_folder(),
            search_path=forkserver.search_path(),
        )
        policy = replace(
            spec.policy or Policy(workers=identity.size, shards=identity.size),
            workers=identity.size,
            elastic=False,
        )
        return LaunchPlan(launcher=self.name, jobs=(job,), out=spec.out, record=spec.record, policy=policy)

    def launch(self, plan: LaunchPlan) -> Outcome:
        """Do the work here; what goes wrong is raised here, for the launcher above to see."""
        import torch

        from paceline.compat import dynamo
        from paceline.launch.workers.context import Worker

        dynamo.install()
        job = plan.jobs[0]
        with contextlib.ExitStack() as undone:
            undone.enter_context(_as_before())
            torch.set_num_threads(job.threads)
            if plan.out is not None and job.identity.rank == 0:
                self._take(plan.out, plan.record, job.identity, undone)
            undone.callback(let_gloo_rest)  # the script may end at once
            try:
                return Outcome(results=(job.call(Worker(identity=job.identity)),))
            except SystemExit as request:
                if request.code not in (None, 0):
                    raise
                # Whoever has started this process would take it for done.
                raise WorkerFailedError(
                    job.identity.rank, env.host(), "exited with status 0 before its part was done"
                ) from request

    def _take(
        self, out: Path, record: Mapping[str, Any], identity: Identity, undone: contextlib.ExitStack
    ) -> None:
        """Make the run folder this world's, until `undone`."""
        above = self._has_launcher(identity)
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = None if above else claim(out)
            if lock is not None:
                undone.callback(os.close, lock)
            if in_progress(out) is None:
                undone.enter_context(owned(out, "paceline run" if above else self.starter))
            folder.write_spec(out, record)
        except OSError as error:
            raise InputError(
                f"the run folder {out} cannot be written: {error.strerror}. Choose another --out."
            ) from error

    def _has_launcher(self, identity: Identity) -> bool:
        """Return whether `paceline run` has started this world, whose folder it may have locked itself."""
        return self.name == JoinedLauncher.name and bool(identity.store)

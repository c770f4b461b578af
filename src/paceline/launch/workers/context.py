"""What a call finds in the worker it runs in: who it is, and the `Run` that it joins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from paceline.errors import PacelineError
from paceline.launch.workers.membership_client import MembershipClient
from paceline.observe import Note
from paceline.recovery.membership import FixedMembership, Membership
from paceline.training import folder
from paceline.training.listeners import Listeners
from paceline.training.options import RunOptions
from paceline.training.run import Run, engine_of
from paceline.world import connect
from paceline.world.env import Identity
from paceline.world.presence import Presence
from paceline.world.status_page import NoStatusPage, Phase
from paceline.world.words import say_returned

_STEP, _BETWEEN, UNFINISHED = "paceline_step", "paceline_between", "paceline_unfinished"
_NO_GROUP = "Default process group has not been initialized"
"""What torch.distributed says where there is none."""
_SERVES = (
    "This worker is a parameter server: its loop has the same steps, but no batches, so what is set inside `for batch in step` "
    "is not there after it. Set it before, or use what step.apply() returns."
)
_ALONE = (
    "A run of one process has no process group of torch's. Use run.world.comm (all_reduce, broadcast, ...), run.world.rank "
    "and run.world.size, which answer for any number of workers, also when a run goes on with one of several; or ask "
    "torch.distributed.is_initialized() first."
)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What a call finds out about the worker it runs in."""

    identity: Identity
    newcomer: bool = False
    """Whether it joins a run that is in progress."""
    starts: int = 0
    """How often all workers were started over."""
    launcher: Connection | None = None
    status_page: NoStatusPage = field(default_factory=NoStatusPage)
    events: int | None = None
    """The descriptor that events go to, where the launcher has given one."""


@contextlib.contextmanager
def open_run(worker: Worker, options: Mapping[str, Any], notes: Sequence[str] = ()) -> Iterator[Run]:
    """Join the world, make the `Run`, and leave the world afterwards; `notes` are what the user is to know first."""
    made = RunOptions(**options)
    membership: Membership = FixedMembership()
    if worker.launcher is not None:
        membership = MembershipClient(worker.launcher, newcomer=worker.newcomer, elastic=made.elastic)
    # The launcher of a worker sees how its call ends; the others of a world that is joined do not.
    alone = worker.launcher is not None or worker.identity.size == 1
    presence = None if alone else Presence(worker.identity)
    run = _join(worker, made, membership, presence)
    engine = engine_of(run)
    try:
        for text in notes if worker.starts == 0 and not worker.newcomer else ():
            engine.state.emit(Note(text=text))
        with contextlib.nullcontext() if presence is None else presence.watching(run.world.interruption):
            yield run
            engine.calls.finish()
            say_returned(run.world)
        if presence is not None:
            presence.finish()
    except BaseException as error:
        state = engine.state
        replica = state.replica_or_none
        explained: PacelineError | None = None if replica is None else replica.placement.explained(error)
        if presence is not None:
            explained = presence.explained(error) or explained
            presence.leave(explained or error)  # before the connections close, of which the others ask why
        raised = explained or error
        vars(raised)[_STEP], vars(raised)[UNFINISHED] = state.position.number, state.in_training
        vars(raised)[_BETWEEN] = state.step is None or state.step.number != state.position.number
        if run.world.size == 1 and isinstance(error, ValueError) and _NO_GROUP in str(error):
            error.add_note(_ALONE)
        if isinstance(error, NameError) and replica is not None and not replica.placement.computes:
            error.add_note(_SERVES)
        if explained is not None:
            raise explained from error
        raise
    finally:
        engine.close()


def _join(worker: Worker, options: RunOptions, membership: Membership, presence: Presence | None) -> Run:
    """Enter the world and make the run; rank 0 sends events to the launcher, where that has given a descriptor for them."""
    if worker.starts == 0 and not membership.newcomer:
        folder.check(options)
    worker.status_page.enter(Phase.STARTING)
    world = connect(
        worker.identity,
        backend=options.backend,
        device=options.device,
        checked=options.check_collectives,
        status_page=worker.status_page,
        presence=presence,
    )
    listeners = Listeners(options, worker.events)
    listeners.listen(first=world.is_first and not membership.newcomer)
    return Run(world, options, membership, listeners)


def step_of(error: BaseException) -> int | None:
    """Return the step in which an exception ended a run."""
    step: int | None = vars(error).get(_STEP)
    return step


def is_between_steps(error: BaseException) -> bool:
    """Return whether it did so before that step was begun."""
    return bool(vars(error).get(_BETWEEN))

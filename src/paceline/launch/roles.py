"""`paceline.launch_roles`: named groups of workers, each running its own function, that call each other.

paceline.launch_roles({"trainers": Role(train, workers=2), "servers": 1})
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import InputError, WorkerFailedError
from paceline.launch import job
from paceline.launch.base import LaunchSpec, Outcome
from paceline.launch.console import Console
from paceline.launch.joined import JoinedLauncher
from paceline.launch.local import LocalLauncher
from paceline.launch.membership import Policy
from paceline.launch.role_call import MODULES, RoleCall
from paceline.observe.events import Event, WorkerLost
from paceline.remote import reach
from paceline.remote.names import INTERFACE, ROLES, SECRET, Roles
from paceline.remote.roles import Role

_SECRET_BYTES = 32


def launch_roles(
    roles: Mapping[str, Role | int],
    *,
    out: str | Path | None = None,
    threads: int | None = None,
    interface: str | None = None,
    secret: bytes | None = None,
    timeout_s: float = 60.0,
) -> dict[str, tuple[Any, ...]]:
    """Start workers by role, run each role's function on its workers, and give what they returned, by role.

    A role given as a number has no function: its workers serve calls until all others have come to their end. `timeout_s` is
    how long a call may take that sets no time-out of its own. A worker that was lost and that the others could do without
    (`Role(required=False)`) has None for a result. Calls stay on this machine's loopback interface unless another is named.

    Started by torchrun, this process is one of the workers already: give all of them the same `secret`; what comes back
    is this worker's own result.
    """
    if job.importing():
        raise job.ReachedLaunch
    made = {name: _role(name, role) for name, role in roles.items()}
    named = Roles.of({name: role.workers for name, role in made.items()})
    joined = JoinedLauncher()
    is_joined = joined.detect()
    if is_joined and secret is None:
        raise InputError(
            "these workers were started one by one, so they have no secret in common. Give all the same launch_roles(secret=...)."
        )
    spec = LaunchSpec(
        call=RoleCall(
            roles=named,
            calls=_calls(made),
            secret=secret or new_secret(),
            interface=reach.chosen(interface),
            timeout_s=timeout_s,
        ),
        workers=named.size,
        threads=threads,
        out=None if out is None else Path(out),
        modules=MODULES,
        record={"roles": dict(named.sizes)},
        policy=_policy(made, named),
    )
    if is_joined:
        plan = joined.plan(spec)
        return {named.role(plan.jobs[0].identity.rank): joined.launch(plan).value()}
    launcher = LocalLauncher(RoleConsole(named))
    return _by_role(named, launcher.launch(launcher.plan(spec)))


def new_secret() -> bytes:
    """Make the secret by which the workers of one launch know each other."""
    return secrets.token_bytes(_SECRET_BYTES)


def role_variables(roles: Roles, interface: str | None) -> dict[str, str]:
    """Give what the workers of a script find in their environment, for `remote.join`."""
    return {ROLES: str(roles), SECRET: new_secret().hex(), INTERFACE: reach.chosen(interface)}


class RoleConsole(Console):
    """Shows rank 0's output, and says which workers are lost."""

    def __init__(self, roles: Roles) -> None:
        super().__init__()
        self._roles = roles

    def event(self, event: Event) -> None:
        """Show one event."""
        super().event(event)
        if isinstance(event, WorkerLost):
            name = self._roles.names[event.rank]
            where = f"rank {event.rank} on {event.host}"
            sys.stderr.write(f"paceline: {name} ({where}) {event.reason}; the others go on without it.\n")


def _role(name: str, given: Role | int) -> Role:
    if not isinstance(given, Role | int):
        raise InputError(
            f"the role {name} is {given!r}. Give a number of workers that only serve, or remote.Role(function, workers)."
        )
    return Role(workers=given) if isinstance(given, int) else given


def _calls(roles: Mapping[str, Role]) -> tuple[job.FunctionCall | None, ...]:
    if all(role.function is None for role in roles.values()):
        raise InputError(
            "no role has a function, so nobody would do anything. Give one to a role: Role(train)."
        )
    return tuple(
        None if role.function is None else job.function_call(role.function, role.args, dict(role.kwargs), {})
        for role in roles.values()
    )


def _policy(roles: Mapping[str, Role], named: Roles) -> Policy:
    expendable = {rank for rank in range(named.size) if not roles[named.role(rank)].required}
    return Policy(workers=named.size, shards=named.size, elastic=False, expendable=frozenset(expendable))


def _by_role(named: Roles, outcome: Outcome) -> dict[str, tuple[Any, ...]]:
    """Give the results by role; those of lost workers are None."""
    try:
        returned = iter(outcome.value())
    except WorkerFailedError as error:
        error.add_note(f"rank {error.rank} is {named.names[error.rank]}.")
        raise
    by_rank = [None if rank in outcome.lost else next(returned) for rank in range(named.size)]
    return {
        role: tuple(value for rank, value in enumerate(by_rank) if named.role(rank) == role)
        for role, _ in named.sizes
    }

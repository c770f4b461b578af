"""`paceline.launch_roles`: named groups of workers, each running its own function, that call each other.

paceline.launch_roles({"trainers": Role(train, workers=2), "servers": 1})
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.compat import python
from paceline.errors import InputError, WorkerFailedError
from paceline.launch import job
from paceline.launch.base import LaunchSpec, Outcome
from paceline.launch.clean_up import check_call
from paceline.launch.clusters import entering
from paceline.launch.clusters.joined import JoinedLauncher
from paceline.launch.console import Console
from paceline.launch.local import LocalLauncher
from paceline.launch.nodes import machines
from paceline.launch.policy import Policy
from paceline.launch.workers.role_call import MODULES, RoleCall
from paceline.observe.events import Event, WorkerLost
from paceline.remote.names import INTERFACE, ROLES, Roles
from paceline.remote.roles import Role
from paceline.training.options import RunOptions
from paceline.training.script import check_importing
from paceline.world import env

_SECRET_BYTES = 32


def launch_roles(
    roles: Mapping[str, Role | int],
    *,
    out: str | Path | None = None,
    threads: int | None = None,
    interface: str | None = None,
    secret: bytes | None = None,
    timeout_s: float = 60.0,
    nodes: int = 1,
    rendezvous: str | None = None,
    lead: bool | None = None,
    secret_file: str | None = None,
    join_timeout: float = RunOptions.join_timeout,
    machine_timeout: int = RunOptions.machine_timeout,
) -> dict[str, tuple[Any, ...]]:
    """Start workers by role, run each role's function on its workers, and give what they returned, by role.

    A role given as a number has no function: its workers serve calls until all others have come to their end. `timeout_s` is
    how long a call may take that sets no time-out of its own. A worker that was lost and that the others could do without
    (`Role(required=False)`) has None for a result. Calls stay on this machine's loopback interface unless another is named.

    Several machines each make the same call with the same `nodes` and `rendezvous` (`host:port`, an address of the one that
    leads; `lead=True` says so where that cannot be seen) and the same secret, in PACELINE_SECRET or `secret_file`: ranks are
    dealt out evenly, the first to the one that leads. What workers returned is known there, from other
    machines as far as JSON can say it (a tuple comes as a list); elsewhere the answer is empty.

    Started by torchrun, this process is one of the workers already: give all of them the same `secret`; what comes back
    is this worker's own result.
    """
    check_importing()
    entering.enter(rendezvous=rendezvous)
    made = {name: _role(name, role) for name, role in roles.items()}
    named = Roles.of({name: role.workers for name, role in made.items()})
    joined = JoinedLauncher()
    is_joined = joined.detect()
    if is_joined and secret is None:
        raise InputError(
            "these workers were started one by one, so they have no secret in common. Give all the same launch_roles(secret=...)."
        )
    if is_joined:
        joined.check(rendezvous)
    where = machines.meeting(
        rendezvous, str(nodes), join_timeout=join_timeout, machine_timeout=machine_timeout, lead=lead
    )
    calls = _calls(made)
    if not is_joined and any(call is not None and call.main_path is not None for call in calls):
        check_call(python.frame(1))
    spec = LaunchSpec(
        call=RoleCall(
            roles=named,
            calls=calls,
            interface=machines.taken(interface, where),
            timeout_s=timeout_s,
            secret=secret,
        ),
        workers=machines.share(named.size, where),
        threads=threads,
        out=None if out is None else Path(out),
        modules=MODULES,
        record={"roles": dict(named.sizes)},
        policy=_policy(made, named),
        shared=secret_variable(secret),
        rendezvous=where,
        secret_file=secret_file,
        agreed=_agreed(made, named, calls) if where is not None else {},
    )
    if is_joined:
        plan = joined.plan(spec)
        return {named.role(plan.jobs[0].identity.rank): joined.launch(plan).value()}
    launcher = LocalLauncher(RoleConsole(named))
    return _by_role(named, launcher.launch(launcher.plan(spec)))


def role_variables(roles: Roles, interface: str) -> dict[str, str]:
    """Return what the workers of a script find in their environment, for `remote.join`."""
    return {ROLES: str(roles), INTERFACE: interface}


def secret_variable(secret: bytes | None = None) -> dict[str, str]:
    """Return the secret by which the workers of one launch know each other, as they find it in their environment."""
    return {env.SECRET: (secret or secrets.token_bytes(_SECRET_BYTES)).hex()}


def _agreed(
    roles: Mapping[str, Role], named: Roles, calls: Sequence[job.FunctionCall | None]
) -> dict[str, str]:
    """Return what must be the same on every machine; arguments may differ, and each machine's workers get its own."""
    program = next(call for call in calls if call is not None)
    functions = " ".join("-" if call is None else call.name for call in calls)
    required = " ".join(name for name, role in roles.items() if role.required)
    facts = {"roles": named, "functions": functions, "required": required}
    return machines.program_facts(facts, program.main_path or "")


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
            self.line(f"paceline: {name} ({where}) {event.reason}; the others go on without it.")


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
    """Return the results by role; those of lost workers are None."""
    if outcome.led_by is not None:
        return {}
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

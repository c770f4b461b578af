"""How a script that somebody has started on several workers enters their session.

    with paceline.remote.join() as session:
        if session.role == "trainers":
            ...

`paceline run --roles trainers=2,servers=1 script.py` tells each worker all it needs; under torchrun the script says it.
"""

from __future__ import annotations

import itertools
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.errors import InputError
from paceline.remote import reach
from paceline.remote.names import INTERFACE, ROLES, Roles
from paceline.remote.opening import JOIN_S, TIMEOUT_S, open_session
from paceline.remote.reach import LOOPBACK
from paceline.remote.session import Session
from paceline.world import env
from paceline.world.ended import Lookout
from paceline.world.env import Identity
from paceline.world.join import meet, of_launch, telling_of_a_wait
from paceline.world.presence import Presence

_meetings = itertools.count()


def join(
    roles: str | Roles | None = None,
    *,
    secret: bytes | str | None = None,
    interface: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Session:
    """Meet the workers that were started together with this one, and give the session with them.

    What is left out is as `paceline run --roles` set it.
    """
    identity = env.identity()
    if identity is None:
        raise InputError(
            "RANK and WORLD_SIZE are not set, so there is nobody to join. Start the script with paceline run --roles."
        )
    chosen = roles or env.read(ROLES)
    if chosen is None:
        raise InputError(
            "nobody said which roles there are. Start it with paceline run --roles trainers=2 SCRIPT, or give join(roles=...)."
        )
    return enter(
        identity,
        Roles.parse(chosen) if isinstance(chosen, str) else chosen,
        secret,
        interface=reach.chosen(interface) if interface else env.read(INTERFACE) or LOOPBACK,
        timeout_s=timeout_s,
    )


def enter(
    identity: Identity,
    roles: Roles,
    secret: bytes | str | None = None,
    *,
    interface: str,
    timeout_s: float,
) -> Session:
    """Meet the others at the launcher's store, each in its role; the launcher has told the secret where none is given.

    The meetings of a process are counted, and the number is part of where the others are met: all of them make the same calls,
    and a session never reads what the one before has left in the store.
    """
    told = env.read(env.SECRET)
    if not (secret or told):
        raise InputError(
            "nobody gave the run's secret. Start the script with paceline run --roles, or give all the same join(secret=...)."
        )
    if identity.size != roles.size:
        raise InputError(
            f"the roles {roles} need {roles.size} workers, but {identity.size} were started. Make the two agree."
        )
    reach.check(interface)
    met = meet(identity, timedelta(seconds=JOIN_S))
    number = next(_meetings)
    store: Store = PrefixStore(f"{of_launch(identity)}/roles-{number}", met)
    presence = Presence(identity, f"join {number + 1}")
    try:
        with telling_of_a_wait(identity, JOIN_S, presence):
            presence.arrive(met, JOIN_S)
    except BaseException as error:
        presence.leave(error)
        raise
    given = secret.encode() if isinstance(secret, str) else secret
    session = open_session(
        store, identity.rank, roles, given or _told(told or ""), interface=interface, timeout_s=timeout_s
    )
    session.find_ended = Lookout(met, identity).find
    session.keeps.append(met)  # torch's half of a store does not keep Python's
    return session


def _told(text: str) -> bytes:
    """Read the variable: a launcher writes the secret's bytes as hexadecimal digits, and others write what they like."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return text.encode()

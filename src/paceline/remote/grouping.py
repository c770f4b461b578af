"""The session of a training group: its trainers and its servers, by the ranks they have there."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import torch

from paceline.errors import InputError
from paceline.remote.names import Roles
from paceline.remote.opening import open_session
from paceline.remote.reach import of_group
from paceline.remote.session import Session
from paceline.world.run_secret import run_secret

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from paceline.world import World

SECRET_BYTES = 32
MEETING_S = 20.0
"""How long workers may take to meet when a group has formed: one may be lost in that very moment."""
PARTING_S = 2.0
"""How long a worker that has come to its end waits for the others: one may have failed, and tells only when all have parted."""
PATIENCE_S = 24 * 3600.0
"""For calls that wait for other workers, far longer than any step: of a lost one the launcher tells, which ends the wait."""
_open: tuple[Store, Session] | None = None


def open_group(world: World) -> Session:
    """Return the session of a group that has formed; all its workers call it, and it ends with the world.

    `trainer:0` is rank 0; servers follow behind the last trainer. A second run in the same world has the same session.
    """
    if world.store is None or not world.mesh.servers:
        raise InputError("a group without servers needs no session. Use a strategy that has servers.")
    global _open  # noqa: PLW0603  (a worker is in one session at a time)
    if _open is not None and _open[0] is world.store and _open[1].is_open:
        return _open[1]
    mesh = world.mesh
    secret = _group_secret(world)
    session = open_session(
        world.store,
        world.rank,
        Roles((("trainers", mesh.trainers), ("servers", mesh.servers))),
        secret,
        interface=of_group(),
        timeout_s=MEETING_S,
    )
    world.closing.append(lambda: _part(world, session))
    _open = world.store, session
    return session


def _group_secret(world: World) -> bytes:
    """Return what the workers of this group share: made of the run's secret where there is one, so that nothing is sent."""
    of_run = run_secret()
    if of_run is not None:
        return of_run.key("group", str(world.generation))
    drawn = torch.frombuffer(bytearray(secrets.token_bytes(SECRET_BYTES)), dtype=torch.uint8)
    return bytes(world.comm.broadcast(drawn.to(world.device)).cpu().numpy().tobytes())


def _part(world: World, session: Session) -> None:
    """Leave when the others do: the last answer of this worker may be on its way to one of them."""
    if session.is_open and not world.interruption.raised:
        session.wait_for_others(PARTING_S)
    session.abandon()

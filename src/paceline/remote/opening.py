"""How a session begins: the workers meet and prove the run's secret, and whatever a message may ask for or name is here."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING

from paceline.remote import autograd, dispatch, pipeline, reference_report  # noqa: F401  (what a message may ask for)
from paceline.remote.exchange import MessageExchange
from paceline.remote.incoming import take
from paceline.remote.meeting import meet, this_machine
from paceline.remote.names import Roles
from paceline.remote.reach import LOOPBACK
from paceline.remote.session import Session, refuse_second
from paceline.remote.vocabulary import Registered
from paceline.transport.mailbox import Mailbox

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

TIMEOUT_S = 60.0
JOIN_S = 120.0
"""How long workers that start together wait for each other."""


def open_session(
    store: Store,
    rank: int,
    roles: Roles,
    secret: bytes,
    *,
    interface: str = LOOPBACK,
    timeout_s: float = TIMEOUT_S,
    machine: str | None = None,
) -> Session:
    """Meet the others at `store`, which must be this session's own, prove the secret, and be ready for calls.

    Workers that give another `machine` are reached over the network, as those of another machine are.
    """
    refuse_second()
    store.set_timeout(timedelta(seconds=JOIN_S))
    mailbox = Mailbox(secret)
    exchange = MessageExchange(rank, roles, mailbox, Registered())
    session = Session(store, roles, exchange, timeout_s)
    try:
        peers = meet(
            store, rank, roles, secret, mailbox, interface=interface, machine=machine or this_machine()
        )
    except BaseException:
        exchange.close()
        raise
    session.start(peers, functools.partial(take, session))
    return session

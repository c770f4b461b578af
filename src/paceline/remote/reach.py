"""From where a worker can be called: the network interface that it takes calls on. Imports no torch."""

from __future__ import annotations

import socket
import sys

from paceline.errors import InputError
from paceline.world import env, interfaces

LOOPBACK = "lo"


def check(interface: str) -> str:
    """Return an interface of this machine; refuse what is none."""
    known = [name for _, name in socket.if_nameindex()]
    if interface not in known:
        raise InputError(f"there is no network interface {interface!r} here. Known: {', '.join(known)}.")
    return interface


def of_group() -> str:
    """Return the interface on which the workers of a group reach each other, now and when another machine has come.

    torch looks once in a process's life which address an interface has.
    """
    identity = env.identity()
    if identity is None or interfaces.is_loopback(identity.master_address):
        return LOOPBACK
    return env.read("GLOO_SOCKET_IFNAME") or interfaces.reaching(identity.master_address).interface


def chosen(interface: str | None) -> str:
    """Return the interface that a user has named, with a warning of what that means; else the loopback one."""
    if interface is None or interface == LOOPBACK:
        return LOOPBACK
    check(interface)
    sys.stderr.write(
        f"paceline: warning: calls are taken on {interface}: whoever reaches that address and knows this run's secret can run "
        "the registered services. Keep the secret from others.\n"
    )
    return interface

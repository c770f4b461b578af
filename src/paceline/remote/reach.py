"""From where a worker can be called: the network interface that it takes calls on. Imports no torch."""

from __future__ import annotations

import socket
import sys

from paceline.errors import InputError
from paceline.world import env, interfaces

LOOPBACK, LOOPBACK_ADDRESS = "lo", "127.0.0.1"


def check(interface: str) -> str:
    """Give an interface of this machine; refuse what is none."""
    known = [name for _, name in socket.if_nameindex()]
    if interface not in known:
        raise InputError(f"there is no network interface {interface!r} here. Known: {', '.join(known)}.")
    return interface


def between(nodes: int) -> str:
    """Give the interface on which workers of some machines reach each other: of one machine, the loopback one."""
    if nodes == 1:
        return LOOPBACK
    identity = env.identity()
    leader = LOOPBACK_ADDRESS if identity is None else identity.master_address
    return env.read("GLOO_SOCKET_IFNAME") or interfaces.reaching(leader).interface


def chosen(interface: str | None) -> str:
    """Give the interface that a user has named, with a warning of what that means; else the loopback one."""
    if interface is None or interface == LOOPBACK:
        return LOOPBACK
    check(interface)
    sys.stderr.write(
        f"paceline: warning: calls are taken on {interface}: whoever reaches that address and knows this run's secret can run "
        "the registered services, and what is sent is not encrypted. Use it only in a network that you trust.\n"
    )
    return interface

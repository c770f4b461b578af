"""How the workers of a session find each other: each writes into a store, which nobody need trust, where it is, and proves it."""

from __future__ import annotations

import hmac
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import CallRefusedError, InputError
from paceline.transport.mailbox import Mailbox, PeerAddress
from paceline.transport.sealing import sign
from paceline.world import env, interfaces

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from paceline.remote.names import Roles


def this_machine() -> str:
    """Return what workers that can share a folder have in common; a launcher may have several nodes on one machine."""
    identity = env.identity()
    return f"{env.host()} {env.kernel()} {0 if identity is None else identity.node_rank}"


def meet(
    store: Store, rank: int, roles: Roles, secret: bytes, mailbox: Mailbox, *, interface: str, machine: str
) -> dict[str, PeerAddress]:
    """Return where the others are, each proved to know the secret; `mailbox` listens from then on.

    Workers of one machine use sockets in its file system; only where there are several does anybody listen on a network.
    """
    ranks = range(roles.size)
    store.set(f"begun/{rank}", json.dumps([mailbox.boot.hex(), machine]))
    begun = [bytes(store.get(f"begun/{one}")) for one in ranks]
    alone = all(_machine(one) == machine for one in begun)
    local, far = mailbox.bind(_folder(), None if alone else address_of(interface))
    mine = json.dumps([mailbox.boot.hex(), machine, local, far])
    store.set(f"entry/{rank}", mine)
    store.set(f"proof/{rank}", _proof(secret, roles.names[rank], begun, mine.encode()).hex())
    found: dict[str, PeerAddress] = {}
    for one, name in enumerate(roles.names):
        entry = bytes(store.get(f"entry/{one}"))
        proof = bytes(store.get(f"proof/{one}"))
        if not hmac.compare_digest(proof, _proof(secret, name, begun, entry).hex().encode()):
            raise CallRefusedError(
                f"{name} does not know this run's secret, so nobody works with it. "
                "Start all workers from one launch, or give all the same secret."
            )
        boot, its_machine, its_local, its_far = json.loads(entry)
        near = its_machine == machine and Path(its_local.removeprefix("ipc://")).exists()
        found[name] = PeerAddress(bytes.fromhex(boot), its_local if near else its_far)
    return found


def address_of(interface: str) -> str:
    """Return the address of a network interface, one of the older kind where it has both."""
    found = [one for one, name in interfaces.local_addresses().items() if name == interface]
    if not found:
        raise InputError(
            f"the network interface {interface} has no address. Give another one with --interface."
        )
    return min(found, key=lambda address: ":" in address)


def _folder() -> str | None:
    given = env.read(env.RUNTIME_DIR)
    return given if given and os.access(given, os.W_OK) else None


def _machine(begun: bytes) -> str:
    try:
        return str(json.loads(begun)[1])
    except (ValueError, IndexError, TypeError):
        return ""  # what a stranger wrote; the proofs tell


def _proof(secret: bytes, name: str, begun: list[bytes], entry: bytes) -> bytes:
    return sign(secret, "directory", [name.encode(), entry, *begun])

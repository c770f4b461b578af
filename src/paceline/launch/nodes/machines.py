"""What the machines of a run have in common: where they meet, and what must be the same on each. Imports no torch."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.errors import InputError
from paceline.launch import job
from paceline.launch.nodes.rendezvous import Rendezvous
from paceline.option_fields import PER_MACHINE, marked
from paceline.ranges import MACHINE_SECONDS, SECONDS
from paceline.remote import reach
from paceline.training.options import RunOptions
from paceline.transport.secret import Secret
from paceline.version import __version__
from paceline.world import interfaces
from paceline.world.env import SECRET
from paceline.world.run_secret import run_secret

_NOT_AGREED = (*marked(RunOptions, PER_MACHINE), "shards_from")


def meeting(
    endpoint: str | None, nodes: str, *, join_timeout: float, machine_timeout: int, lead: bool | None = None
) -> Rendezvous | None:
    """Return where this machine meets others; None where it is not to."""
    join_timeout = SECONDS.read("--join-timeout", join_timeout)
    machine_timeout = MACHINE_SECONDS.read("--machine-timeout", machine_timeout)
    if endpoint is None:
        if Rendezvous.parse("localhost", nodes).max_nodes > 1:
            raise InputError(
                f"--nodes {nodes} machines need a place to meet. Give --rendezvous host:port, with an address of the one "
                "that leads, on each of them."
            )
        return None
    made = Rendezvous.parse(
        endpoint, nodes, join_s=join_timeout, silence_s=float(machine_timeout), leads=lead
    )
    if made.max_nodes == 1 and not made.is_here():
        raise InputError(
            f"--rendezvous {endpoint} is another machine's address, but --nodes {nodes} is this one alone. Give --nodes 2 or "
            "more, or leave --rendezvous out."
        )
    return made


def shared_secret(rendezvous: Rendezvous | None, path: str | None) -> tuple[Secret | None, str]:
    """Return the secret of the machines' run, and the command that brings it to the others where it had to be made."""
    if rendezvous is None:
        if path:
            raise InputError("--secret-file is for several machines. Give --rendezvous, or leave it out.")
        return None, ""
    found = Secret.read(Path(path)) if path else run_secret()
    if found is not None:
        return found, ""
    if not interfaces.resolve(rendezvous.host):
        raise InputError(
            f"--rendezvous {rendezvous.endpoint} names a host that this machine does not know. Give an address of the machine "
            "that leads."
        )
    if not rendezvous.is_here():
        raise InputError(
            f"this machine has no secret, so the one that leads at {rendezvous.endpoint} would not let it in. Set {SECRET} to "
            "what that one printed when it was started, or give --secret-file with the same secret on all machines."
        )
    made = Secret.make()
    return made, f"{SECRET}={made.text} {_command()}"


def _command() -> str:
    """Return the command line of this process, for a machine that follows."""
    called = sys.orig_argv
    if Path(sys.argv[0]).name == "paceline":
        called = ["paceline", *sys.argv[1:]]
    return shlex.join(word for word in called if word != "--lead")


def interface(rendezvous: Rendezvous | None) -> str | None:
    """Return the interface of this machine that leads to the others, if there are others."""
    return None if rendezvous is None else interfaces.reaching(rendezvous.host).interface


def taken(named: str | None, rendezvous: Rendezvous | None) -> str:
    """Return the interface on which calls are taken: as named, or what leads to the other machines, or the loopback one."""
    if rendezvous is None:
        return reach.chosen(named)
    if named == reach.LOOPBACK and not interfaces.is_loopback(rendezvous.host):
        raise InputError(
            f"--interface {named} takes calls of this machine only, but machines meet at {rendezvous.endpoint}. Leave it out."
        )
    return reach.chosen(named or interface(rendezvous))


def share(workers: int, rendezvous: Rendezvous | None) -> int:
    """Return how many of some workers the machine that leads has: all have as many, or one less."""
    if rendezvous is None:
        return workers
    if rendezvous.min_nodes != rendezvous.max_nodes:
        raise InputError(
            f"--nodes {rendezvous.nodes} may change, but these workers are dealt out once. Give one number of machines."
        )
    if workers < rendezvous.max_nodes:
        raise InputError(
            f"{workers} workers leave some of {rendezvous.max_nodes} machines with nothing to do. Use fewer machines."
        )
    return -(-workers // rendezvous.max_nodes)


def agreed(
    function: Callable[..., Any] | str, options: RunOptions, record: Mapping[str, Any]
) -> dict[str, str]:
    """Return all that must be the same on every machine, by the names that the user knows."""
    facts: dict[str, Any] = {
        name: value for name, value in record.items() if name not in ("options", "overrides")
    }
    facts |= {name: value for name, value in asdict(options).items() if name not in _NOT_AGREED}
    facts |= {f"--set {name}": value for name, value in facts.pop("settings", {}).items()}
    facts["program"] = facts.pop("name", None) or job.name_of(function)
    source, _, _ = str(facts.pop("task", "")).partition(":")
    return program_facts(facts, source)


def program_facts(facts: Mapping[str, Any], source: str) -> dict[str, str]:
    """Add what goes for every program: the file that it is in, and what it runs on."""
    found = dict(facts)
    if source.endswith(".py") and Path(source).is_file():
        # Its folder may be another one on each machine; what it says may not.
        content = hashlib.sha256(Path(source).read_bytes()).hexdigest()
        found[f"the source of {Path(source).name}"] = content[:12]
    found |= {"paceline": __version__, "torch": _installed("torch")}
    return {name.replace("_", "-"): str(value) for name, value in found.items() if value is not None}


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

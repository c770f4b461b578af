"""`paceline doctor`: what is here, what keeps training from starting, and which strategy suits."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import AsJson
from paceline.cli.outcome import show_report
from paceline.errors import UnknownNameError
from paceline.launch.nodes.rendezvous import DEFAULT_PORT
from paceline.ranges import SECONDS
from paceline.training.options import BACKENDS
from paceline.world import env


def doctor(
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Check that these machines find and reach each other; give the same on each of them, at the same time.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="The port that they meet at, as --rendezvous has it.")
    ] = DEFAULT_PORT,
    wait: Annotated[float, typer.Option(help="Seconds that the others may start later.")] = 5.0,
    backend: Annotated[
        str | None, typer.Option(help="Try this backend only. Inside a job: auto, unless it is given.")
    ] = None,
    json_: AsJson = False,
) -> int:
    """Check this machine, or the machines of a job: devices, limits, network, a live all-reduce; say what suits them."""
    from paceline.doctor.examination import examine
    from paceline.doctor.hosts import parsed

    if backend is not None and backend not in BACKENDS:
        raise UnknownNameError("backend", backend, BACKENDS)
    names = parsed(hosts) if hosts is not None else ()
    found = examine(
        backend=None if backend == "auto" else backend,
        names=names,
        port=port,
        wait_s=SECONDS.read("--wait", wait),
    )
    identity = env.identity()
    if identity is not None and identity.rank > 0 and found.together:
        return 0 if found.holds else 1  # rank 0 says why
    return show_report(found, as_json=json_)

"""Starts the agent and its observers. Imports no torch: the workers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.cli.cartpole.request import RolloutRequest, check_installed
from paceline.launch.roles import launch_roles
from paceline.remote.roles import Role

AGENT = "paceline.cli.cartpole.agent:train"
MODEL = "model.safetensors"
"""The learned policy, in the run folder."""


def start(request: RolloutRequest, out: Path | None = None) -> dict[str, Any]:
    """Train with one agent and several observers, and give the agent's result; a lost observer costs only time."""
    check_installed()
    roles = {
        "agent": Role(AGENT, args=(request, None if out is None else Path(out).resolve() / MODEL)),
        "observers": Role(workers=request.observers, required=False),
    }
    # The bits of a sum depend on the number of threads, which must not follow the number of observers.
    found: dict[str, Any] = launch_roles(roles, out=out, threads=1)["agent"][0]
    return found

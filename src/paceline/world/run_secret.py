"""The run's secret, as this process's environment tells it. No torch."""

from __future__ import annotations

from paceline.transport.secret import Secret
from paceline.world import env


def run_secret() -> Secret | None:
    """Return the secret that the environment holds, or names the file of; None where there is none."""
    return Secret.given(env.read(env.SECRET), env.read(env.SECRET_FILE))

"""An observer that is killed in the middle of its work, and the agent that has to do with it."""

from __future__ import annotations

import os
import signal

from paceline import remote
from paceline.cli.cartpole import agent
from paceline.cli.cartpole.observer import Episode, Observer

DOOMED = "observer:1"
LAST_WORDS = 20


@remote.service
class Doomed(Observer):
    """Is killed on one of the workers when a later round begins."""

    def play(self, numbers: list[int]) -> list[Episode]:
        """Play them, unless this is the one."""
        if remote.current().name == DOOMED and max(numbers) >= LAST_WORDS:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().play(numbers)


def train(session, request):
    agent.Observer = Doomed
    return agent.train(session, request)

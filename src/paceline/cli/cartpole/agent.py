"""The agent: has rounds of episodes played, learns from each, and stops when the task is solved."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from paceline import remote
from paceline.checkpoint.fingerprint import weights_sha256
from paceline.checkpoint.safetensors_format import write_tensors
from paceline.cli.cartpole.learning import Learner
from paceline.cli.cartpole.observer import Episode, Observer
from paceline.cli.cartpole.policy import Policy
from paceline.cli.cartpole.request import GOAL, WINDOW, RolloutRequest
from paceline.observe import formats
from paceline.remote.rollouts import Rollouts

ROUND = 16
"""Episodes that are played with the same weights, whatever the number of observers."""
SHOW_EVERY_S = 1.0


def train(session: remote.Session, request: RolloutRequest, saved: Path | None = None) -> dict[str, Any]:
    """Train the policy on this worker with the episodes of the observers, save it, and give what came of it."""
    begun = time.monotonic()
    policy = remote.create(session.name, Policy, request.seed)
    network = remote.service_of(policy).network
    learner = Learner(network)
    observers: Rollouts[Episode] = Rollouts("observers", Observer, policy, request.seed, request.batched)
    progress = _Progress(request.episodes)
    returns: list[int] = []
    while len(returns) < request.episodes and not _solved(returns):
        episodes = observers.gather(range(len(returns), min(len(returns) + ROUND, request.episodes)))
        returns += [episode.total for episode in episodes]
        progress.show(returns)
        if not _solved(returns):
            learner.learn(episodes)
    seconds = time.monotonic() - begun
    if saved is not None:
        write_tensors(saved, network.state_dict(), {"task": "cartpole", "episodes": str(len(returns))})
    return {
        "task": "cartpole",
        "solved": _solved(returns),
        "episodes": len(returns),
        "mean_return": _mean(returns),
        "goal": GOAL,
        "steps": sum(returns),
        "steps_per_s": sum(returns) / seconds,
        "observers": request.observers,
        "lost": sorted(session.lost),
        "batched": request.batched,
        "seed": request.seed,
        "weights_sha256": weights_sha256(network.state_dict()),
        "model": None if saved is None else str(saved),
        "wall_s": seconds,
        "returns": returns,
    }


class _Progress:
    """A line on standard error about once a second."""

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes
        self._shown, self._steps = time.monotonic(), 0

    def show(self, returns: list[int]) -> None:
        """Show where the training is, if the last line is old enough."""
        now, steps = time.monotonic(), sum(returns)
        if now - self._shown < SHOW_EVERY_S:
            return
        speed = formats.count((steps - self._steps) / (now - self._shown))
        self._shown, self._steps = now, steps
        window = min(WINDOW, len(returns))
        sys.stderr.write(
            f"episode {len(returns):,}/{self._episodes:,}  mean return of the last {window} {_mean(returns):.1f}  "
            f"{speed} steps/s\n"
        )
        sys.stderr.flush()


def _mean(returns: list[int]) -> float:
    last = returns[-WINDOW:]
    return sum(last) / len(last)


def _solved(returns: list[int]) -> bool:
    return len(returns) >= WINDOW and _mean(returns) >= GOAL

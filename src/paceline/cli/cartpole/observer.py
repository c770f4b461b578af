"""An observer: plays episodes by their numbers, and asks the agent at every step what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from torch import Tensor

from paceline import remote
from paceline.cli.cartpole.policy import Policy, Question
from paceline.world import seeds

ENVIRONMENT = "CartPole-v1"


@remote.allow
@dataclass(frozen=True)
class Episode:
    """What happened from the first state to the last."""

    states: Tensor
    """One more than there are actions: the last is the one in which it ended."""
    actions: Tensor
    fell: bool
    """Whether the pole fell; otherwise the time was up."""

    @property
    def total(self) -> int:
        """Return the return: one point for each step."""
        return len(self.actions)


@remote.service
class Observer:
    """Plays several episodes side by side, so that it has something to do while it waits for an answer."""

    def __init__(self, policy: Policy, seed: int, batched: bool) -> None:
        asked = remote.method(policy.act_batched if batched else policy.act)
        self._ask = cast("remote.Method[[Question], int]", asked)
        self._seed = seed
        self._environments: list[gymnasium.Env[Any, Any]] = []

    def play(self, numbers: list[int]) -> list[Episode]:
        """Play the episodes of these numbers; all chance in an episode comes from the seed and its number."""
        while len(self._environments) < len(numbers):
            self._environments.append(gymnasium.make(ENVIRONMENT, disable_env_checker=True))
        games = [
            _Game(environment, self._seed, number, self._ask)
            for environment, number in zip(self._environments, numbers, strict=False)
        ]
        running = games
        while running:
            running = [game for game in running if game.advance()]
        return [game.episode() for game in games]


class _Game:
    """One episode in progress, with one question always on its way to the agent."""

    def __init__(self, environment: Any, seed: int, number: int, ask: remote.Method[[Question], int]) -> None:
        self._environment, self._ask = environment, ask
        self._chance = np.random.default_rng(seeds.derive(seed, "actions", number))
        state, _ = environment.reset(seed=seeds.derive(seed, "episode", number))
        self._states: list[list[float]] = [state.tolist()]
        self._actions: list[int] = []
        self._fell = False
        self._answer = self._question()

    def advance(self) -> bool:
        """Take the answer, make the step, ask the next question; say whether the episode goes on."""
        action = self._answer.wait()
        state, _, self._fell, is_late, _ = self._environment.step(action)
        self._actions.append(action)
        self._states.append(state.tolist())
        if self._fell or is_late:
            return False
        self._answer = self._question()
        return True

    def episode(self) -> Episode:
        """Return what happened."""
        return Episode(
            torch.tensor(self._states, dtype=torch.float64),
            torch.tensor(self._actions, dtype=torch.float64),
            self._fell,
        )

    def _question(self) -> remote.Future[int]:
        return self._ask.future((self._states[-1], self._chance.random()))

"""The agent's policy: a network that says how good each action is, and the service that observers ask."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline import remote
from paceline.world import seeds

Question = tuple[list[float], float]
"""A state, and a number drawn evenly from [0, 1) that decides between the actions."""
WIDTH = 64


class Network(nn.Module):
    """Returns for each state the logit of a push to the right, and how long the pole will stay up.

    In double precision: a row of a batch and the same row by itself differ in the last bits, and here such a
    difference is too small to decide an action otherwise in any run that will ever be made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.right = nn.Linear(WIDTH, 1)
        self.value = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and values, one of each a state."""
        features = self.body(states)
        return self.right(features).squeeze(-1), self.value(features).squeeze(-1)


@remote.service
class Policy:
    """What the observers ask for actions: 1 pushes the cart to the right, 0 to the left."""

    def __init__(self, seed: int) -> None:
        with seeds.preserved():
            seeds.seed_everything(seeds.derive(seed, "policy"))
            self.network = Network()

    def act(self, question: Question) -> int:
        """Answer one question."""
        return self._answer([question])[0]

    @remote.batched(max_size=64, max_wait_ms=0)
    def act_batched(self, questions: list[Question]) -> list[int]:
        """Answer all questions that came in while the last ones were answered."""
        return self._answer(questions)

    @torch.no_grad()
    def _answer(self, questions: list[Question]) -> list[int]:
        states = torch.tensor([state for state, _ in questions], dtype=torch.float64)
        right = self.network.right(self.network.body(states)).sigmoid().flatten().tolist()
        return [int(draw < chance) for (_, draw), chance in zip(questions, right, strict=True)]

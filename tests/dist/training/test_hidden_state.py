"""What workers would each have for themselves is refused in real runs, in a loop of one's own and in a task."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError


class Carrying(nn.Module):
    """Adds what the pass before came to, if it is told to."""

    def __init__(self, *, carries: bool) -> None:
        super().__init__()
        self.carries, self.layer, self.h, self.log = carries, nn.Linear(3, 3), torch.zeros(3), torch.zeros(3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        if self.carries:
            outputs = outputs + 0.5 * self.h
        self.h = outputs.detach().mean(0)
        self.log = self.log + self.h
        return outputs


def train(run: paceline.Run, what: str) -> str:
    """Take four steps; the loop has a generator and a state of its own."""
    rng, h = np.random.default_rng(0), torch.zeros(3)
    losses: list[float] = []
    model = Carrying(carries=what == "model")
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.linspace(-1, 1, 48).reshape(16, 3)
    for step in run.steps(TensorDataset(x), batch_size=8, steps=4):
        factor = float(rng.random())
        for (inputs,) in step:
            if what == "generator":
                factor = float(rng.random())
            outputs = model(inputs) + (h if what == "loop" else 0)
            h = outputs.detach().mean(0)
            losses.append(outputs.sum().item())
            step.backward(factor * outputs.pow(2).sum(1))
        step.apply()
    return run.weights_sha256()


@pytest.mark.parametrize(
    ("strategy", "what", "words"),
    [
        ("ddp", "generator", "step 0: the passes draw from the loop's rng, a numpy Generator"),
        ("ddp", "loop", "step 1: the passes carry the loop's h from one to the next"),
        ("fsdp", "model", "step 1: the passes carry h from one to the next"),
    ],
)
def test_what_each_worker_has_for_itself_is_refused(strategy: str, what: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        paceline.launch(train, what, workers=2, shards=4, strategy=strategy)


def test_what_serves_a_log_or_is_drawn_once_a_step_is_trained_to_the_same_bits(
    capfd: pytest.CaptureFixture[str],
) -> None:
    alone = paceline.launch(train, "nothing", shards=4, strategy="single")
    assert paceline.launch(train, "nothing", workers=2, shards=4, strategy="ddp") == alone * 2
    assert "losses" not in capfd.readouterr().err

"""A worker dies while the others read a stream: they read its epoch again, and what they skip must be what they trained on."""

import random

import pytest
import torch

import paceline
from paceline.errors import InputError
from tests.fault.survivors import hashed, set_off


class Shuffled:
    """40 items in another order each epoch, by the process's generator or by one that lives as long as the stream."""

    def __init__(self, kind):
        self.generator = random.Random(3) if kind == "own" else random

    def __iter__(self):
        for number in self.generator.sample(range(40), 40):
            features = torch.randn(4, generator=torch.Generator().manual_seed(number))
            yield features, features.sum().unsqueeze(0)


def train(run, folder, kind, faults):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for step in run.steps(Shuffled(kind), batch_size=8, epochs=3):
        set_off(run, folder, faults, "loop")
        for inputs, targets in step:
            step.backward((model(inputs) - targets).square().flatten())
        step.apply()
    return hashed(model)


def launch(folder, kind, faults, **options):
    return set(
        paceline.launch(train, str(folder), kind, faults, shards=4, threads=1, device="cpu", **options)
    )


KILLED = (("loop", 7, 1, "kill"),)  # in the third step of the second epoch


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_stream_that_begins_its_epochs_the_same_way_again_survives(max_restarts, tmp_path):
    undisturbed = launch(tmp_path, "global", (), strategy="single")
    assert launch(tmp_path, "global", KILLED, workers=3, max_restarts=max_restarts) == undisturbed


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_one_that_does_not_is_refused(max_restarts, tmp_path):
    with pytest.raises(InputError, match="the training stream gives other items"):
        launch(tmp_path, "own", KILLED, workers=3, max_restarts=max_restarts)

"""A backward pass that a loop makes for itself between two steps (a saliency map, a probe) belongs to no step."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


def probed(run: paceline.Run, probes: bool) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    features = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    for step in run.steps(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=8, steps=5):
        for x, y in step:
            step.backward(F.mse_loss(model(x), y, reduction="none").mean(1))
        step.apply()
        if probes:
            model(features).sum().backward()
    return run.weights_sha256()


def test_a_probe_between_two_steps_changes_nothing() -> None:
    (alone,) = paceline.launch(probed, False, strategy="single", shards=2, threads=1)
    for strategy in ("single", "ddp", "fsdp"):
        workers = 1 if strategy == "single" else 2
        found = paceline.launch(probed, True, strategy=strategy, workers=workers, shards=2, threads=1)
        assert set(found) == {alone}, strategy

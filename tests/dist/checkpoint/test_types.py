"""A run goes on with weights of the type that it was saved with, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import paceline


def train(run: paceline.Run, steps: int, dtype: str) -> str:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(getattr(torch, dtype))
    model, _ = run.prepare(model, torch.optim.NAdam(model.parameters(), lr=0.01))
    points = torch.linspace(-1, 1, 80).view(20, 4)
    for step in run.steps(points, batch_size=6, steps=steps):
        for batch in step:
            step.backward(model(batch.to(getattr(torch, dtype))).float().square().flatten())
        step.apply()
    return run.weights_sha256()


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "ps"])
def test_a_resumed_run_with_weights_of_another_type_is_refused(strategy: str, tmp_path: Path) -> None:
    how = {"shards": 2, "threads": 1, "out": tmp_path / "run"}
    paceline.launch(train, 3, "float64", strategy="single", **how)
    resumed = {"strategy": strategy, "workers": 1 if strategy == "single" else 2, "resume": True, **how}
    with pytest.raises(paceline.InputError, match="weight is of float64 in the state, and of float32 here"):
        paceline.launch(train, 6, "float32", **resumed)
    found = paceline.launch(train, 6, "float64", **resumed)
    assert set(found) == {paceline.launch(train, 6, "float64", strategy="single", shards=2, threads=1)[0]}

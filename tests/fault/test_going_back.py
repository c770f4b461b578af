"""A run goes back behind what its workers have done together: those that stay and the one that joins do it again alike."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.launch import api
from paceline.strategies.tuning import Tuning
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec
from paceline.verify.receipts.audit import audit
from tests.fault.survivors import BATCH, Samples, mean_output, once

LAST = 12
"""Steps; an epoch has 5."""


class Troubled(paceline.Task):
    """Raises once where one of its workers computes a step, if it is told which."""

    batch_size, epochs = BATCH, 3

    def __init__(self, folder: str = "", step: int = 0, rank: int = 0) -> None:
        self.folder, self.step, self.rank = folder, step, rank

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    def train_data(self) -> Samples:
        return Samples()

    eval_data = train_data

    def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
        here = self.folder and self.steps_done == self.step and os.environ["RANK"] == str(self.rank)
        if here and once(self.folder, "raised"):
            raise ValueError("a passing trouble")
        return paceline.Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))

    metrics = staticmethod(mean_output)


def train(folder: Path, strategy: str, workers: int, settings: dict[str, str], **options: Any) -> Any:
    spec = TrainSpec(task=f"{__name__}:Troubled", name="troubled", settings=settings, steps=LAST)
    made = RunOptions(
        strategy=strategy, workers=workers, shards=6, device="cpu", out=folder / "run", **options
    )
    outcome = api.start(api.TRAINER, (spec,), {}, made, threads=1)
    assert outcome.failure is None, outcome.failure
    return outcome.results[0]


def told(folder: Path) -> list[tuple[Any, ...]]:
    """Give the last word on each epoch and each evaluation of a run."""
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["kind"] in ("epoch", "evaluated")]
    found = {(one["step"], one["kind"]): one.get("metrics", one.get("loss")) for one in events}
    return sorted(found.items())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process comes to that nothing happens to, and what it tells."""
    folder = tmp_path_factory.mktemp("quiet")
    return train(folder, "single", 1, {}), told(folder)


@pytest.mark.parametrize(
    ("strategy", "workers", "options"),
    [
        ("fsdp", 2, {"save_every": "4"}),
        ("pp", 2, {"save_every": "4"}),
        ("ddp", 2, {"save_every": "4", "tuning": Tuning(shard_optimizer=True)}),
        ("fsdp", 3, {"peer_snapshots": 1, "snapshot_every": 2}),
        ("fsdp", 3, {"peer_snapshots": 1, "snapshot_every": 4}),
    ],
    ids=["fsdp", "pp", "zero", "snapshot of this step", "snapshot"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_behind_an_evaluation(
    strategy: str, workers: int, options: dict[str, Any], rank: int, tmp_path: Path, undisturbed: Any
) -> None:
    settings = {"folder": str(tmp_path), "step": "6", "rank": str(rank)}
    rough = train(tmp_path, strategy, workers, settings, **options)
    alone, then = undisturbed
    assert len(rough["recoveries"]) == 1
    assert "a worker joins" in rough["recoveries"][0]["reason"]
    alike = ("weights_sha256", "metrics", "loss", "steps", "samples", "new_samples")
    assert {key: rough[key] for key in alike} == {key: alone[key] for key in alike}
    assert told(tmp_path) == then
    assert audit(tmp_path / "run").holds

"""Metrics beyond means, and predictions, come to the same bits on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import paceline
from tests.dist.training.measured import SAMPLES, loop


def measure(folder: Path, strategy: str, workers: int, shards: int = 5) -> Any:
    asked: dict[str, Any] = {"threads": 1, "device": "cpu", "kwargs": {"out": str(folder)}}
    return paceline.launch(loop, workers=workers, strategy=strategy, shards=shards, **asked)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return what one process has measured and written."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, measure(folder, "single", 1)[0]


def test_every_sample_is_there_once_and_in_order(alone: tuple[Path, Any]) -> None:
    folder, found = alone
    assert found["measured"]["all/in order"] == 1
    assert found["predicted"]["number"].tolist() == list(range(SAMPLES))
    assert found["rows"] == (SAMPLES, SAMPLES)
    several = load_file(folder / "deep" / "several.safetensors")
    assert {name: torch.equal(one, found["predicted"][name]) for name, one in several.items()} == {
        "scores": True,
        "number": True,
    }
    assert np.array_equal(np.load(folder / "one.npy"), several["scores"].numpy())


def test_torchmetrics_come_to_what_they_say_of_all_samples(alone: tuple[Path, Any]) -> None:
    metrics = pytest.importorskip("torchmetrics.classification")
    found = alone[1]
    scores = found["predicted"]["scores"]
    targets = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))[:, :3].argmax(1)
    area = metrics.BinaryAUROC()(scores.softmax(1)[:, 0], (targets == 0).long())
    assert found["measured"]["f1"] == metrics.MulticlassF1Score(3)(scores, targets).item()
    assert found["measured"]["area"] == area.item()


@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 3), ("fsdp", 2)])
def test_workers_come_to_the_same_bits(
    strategy: str, workers: int, tmp_path: Path, alone: tuple[Path, Any]
) -> None:
    before, expected = alone
    for found in measure(tmp_path, strategy, workers):
        assert found["measured"] == expected["measured"]
        for name, one in found["predicted"].items():
            assert torch.equal(one, expected["predicted"][name])
    for name in ("deep/several.safetensors", "one.npy"):
        assert (tmp_path / name).read_bytes() == (before / name).read_bytes()
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["deep", "one.npy", "several.safetensors"]

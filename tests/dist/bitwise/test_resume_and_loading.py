"""The same bits after a resume in mid-epoch with other workers, and however the data was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import Run, launch
from paceline.training.spec import TrainSpec
from paceline.training.trainer import main

HALF, WHOLE = 5, 11


def train(run: Run, task: str, steps: int, loaders: int) -> str:
    """Train a task of this package to a step and give the hash of its weights."""
    spec = TrainSpec(
        task=f"tests.dist.bitwise.tasks:{task}",
        name=task,
        steps=steps,
        batch_size=13,
        overrides={"num_workers": loaders},
    )
    return str(main(run, spec)["weights_sha256"])


def hash_of(task: str, steps: int, loaders: int = 0, **options: Any) -> str:
    found = set(launch(train, task, steps, loaders, shards=4, threads=1, device="cpu", **options))
    assert len(found) == 1
    return str(found.pop())


@pytest.mark.parametrize("task", ["Pictures", "Sentences"])
def test_a_run_taken_up_by_others_ends_with_the_same_bits(task: str, tmp_path: Path) -> None:
    straight = hash_of(task, WHOLE, strategy="single")
    hash_of(task, HALF, workers=3, out=tmp_path / "run")
    assert hash_of(task, HALF + 2, workers=2, out=tmp_path / "run", resume=True) != straight
    assert hash_of(task, WHOLE, workers=4, out=tmp_path / "run", resume=True) == straight


def test_augmentation_is_the_same_whoever_loads() -> None:
    alone = hash_of("Augmented", WHOLE, strategy="single")
    assert alone != hash_of("Pictures", WHOLE, strategy="single")
    assert hash_of("Augmented", WHOLE, workers=3) == alone
    assert hash_of("Augmented", WHOLE, loaders=2, workers=2) == alone

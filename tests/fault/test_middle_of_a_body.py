"""A loop whose body goes on behind `apply` with what all do together, while workers are lost and join."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from tests.fault.survivors import BATCH, Samples, mean_output, set_off

STEPS = 9
Faults = list[tuple[str, int, int | None, str]]


def train(run: paceline.Run, folder: str, faults: Faults, slow: int | None) -> Any:
    """Evaluate and save behind every step, whether or not it is given once more."""
    late = run.world.rank == slow
    make: Any = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # noqa: E731
    model, _ = run.prepare(make, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    means = run.register_state("means", {"by step": []})
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS):
        set_off(run, folder, faults, "loop")
        if any(action == "to 4" for *_, action in faults) and run.world.size < 4 and step.number > 1:
            time.sleep(0.4)  # whoever joins is on the way
        for index, (features, labels) in enumerate(step):
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
            if not index:
                set_off(run, folder, faults, "batch")
        step.apply()
        mean = run.evaluate(Samples(), mean_output)["mean"]
        if step.number % 3 == 1:
            run.save()
        means["by step"].append(mean)
        if late:
            time.sleep(0.15)  # comes to the next step when the others are in the middle of it
    reasons = [(one["reason"], one["workers"]) for one in run.recoveries]
    return [run.weights_sha256(), means["by step"]], reasons


def launch(folder: Path, faults: Faults, slow: int | None = None, **options: Any) -> Any:
    folder.mkdir()
    chosen = {"workers": 3, "shards": 6, "strategy": "ddp", "out": folder / "run", **options}
    return paceline.launch(train, str(folder), faults, slow, threads=1, device="cpu", **chosen)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launch(tmp_path_factory.mktemp("one") / "quiet", [], strategy="single", workers=1)[0][0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("action", "options"),
    [("kill", {"min_workers": 3}), ("kill", {}), ("raise", {})],
)
@pytest.mark.parametrize("slow", [None, 0])
def test_what_it_comes_to_is_the_same(
    strategy: str, action: str, options: dict[str, Any], slow: int | None, tmp_path: Path, quiet: Any
) -> None:
    if strategy == "fsdp":
        options = {**options, "peer_snapshots": 1, "snapshot_every": 1}
    for found, reasons in launch(
        tmp_path / "hit", [("batch", 4, 1, action)], slow, strategy=strategy, **options
    ):
        assert found == quiet
        assert reasons[0][0].startswith("rank 1")
        if options.get("min_workers") or action == "raise":
            # Those who were left ended their body, and took no step before the third was there.
            assert [workers for _, workers in reasons] == [2, 3]
    assert set(tmp_path.glob("hit/fault-*"))


@pytest.mark.parametrize("slow", [None, 0, 1])
def test_so_it_is_where_workers_join(slow: int | None, tmp_path: Path, quiet: Any) -> None:
    for found, reasons in launch(tmp_path / "more", [("loop", 2, 0, "to 4")], slow):
        assert found == quiet
        assert reasons[-1] == ("a worker joins", 4)

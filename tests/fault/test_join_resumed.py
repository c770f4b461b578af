"""A worker that joins a resumed run is told what the others measured of the checkpoint, before their first steps."""

import os
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.world import fault_points
from tests.fault.survivors import BATCH, Samples, mean_output, set_off


def train(run, folder, faults, steps):
    """Measure, then train, as a loop does that keeps the best weights."""
    torch.manual_seed(1)
    model, _ = run.prepare(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        lambda made: torch.optim.AdamW(made.parameters(), lr=0.05),
    )
    early = {"steps": 0}
    if (
        run._engine.state.options.strategy == "ddp"
    ):  # elsewhere a worker joins that has registered nothing yet
        run.register("early", early)
    measured = [run.evaluate(Samples(), mean_output)["mean"], run.weights_sha256()]
    late = run.register("late", {"steps": 0})
    if run._engine.state.options.strategy != "ddp":
        run.register("early", early)
    began = dict(early), dict(late)
    fault_points.set_fault(lambda point: set_off(run, folder, faults, point))
    for step in run.steps(Samples(), batch_size=BATCH, steps=steps):
        if run.world.size < run._engine.state.workers:
            time.sleep(1.5)  # the one that is missing is on its way
        for inputs, targets in step:
            step.backward(F.cross_entropy(model(inputs), targets, reduction="none"))
        if not step.apply().again:
            early["steps"], late["steps"] = step.number + 1, step.number + 1
    fault_points.set_fault(None)
    return {
        "before": measured,
        "began": began,
        "states": (early["steps"], late["steps"]),
        "weights": run.weights_sha256(),
        "size": run.world.size,
        "environment": [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")],
        "rank": run.world.rank,
    }


def launch(folder, faults, steps, workers, strategy, **options):
    folder.mkdir(exist_ok=True)
    options = {"shards": 4, "device": "cpu", "out": folder / "run", "threads": 1, **options}
    return paceline.launch(train, str(folder), faults, steps, workers=workers, strategy=strategy, **options)


@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("fsdp", 1)])
def test_a_worker_that_joins_is_told_what_was_measured_of_a_checkpoint(tmp_path, strategy, rank):
    launch(tmp_path / "quiet", (), 5, 1, "single")
    (wanted,) = launch(tmp_path / "quiet", (), 14, 1, "single", resume=True)
    launch(tmp_path / strategy, (), 5, 2, strategy)
    results = launch(
        tmp_path / strategy,
        [("forward", 8, rank, "kill")],
        14,
        2,
        strategy,
        resume=True,
        save_every=2,
        keep=1,
    )
    assert len(results) == 2
    for result in results:
        assert result["before"] == wanted["before"]
        assert result["weights"] == wanted["weights"]
        assert result["states"] == (14, 14)
        assert result["size"] == 2
        rank, _, size = result["environment"]  # for code that reads it
        assert (rank, size) == (result["rank"], 2)
    assert sorted(result["environment"][1] for result in results) == [
        0,
        1,
    ]  # each keeps its own place on the machine
    assert ({"steps": 5}, {"steps": 5}) in [result["began"] for result in results]

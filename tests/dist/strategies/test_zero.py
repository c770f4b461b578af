"""--shard-optimizer: each worker keeps a part of the optimizer state; the bits are those of one process."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import weights_sha256
from paceline.state.chunks import ChunkBounds
from paceline.strategies.sharded import deal
from paceline.world import fault_points

STEPS = 9
ZERO = {"shard_optimizer": True}


def make() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)
    )


class Counting(torch.optim.SGD):
    """An optimizer that counts in plain numbers."""

    elementwise = True

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["count"] = 1 + self.state[parameter].get("count", 0)


def optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    decayed = [value for value in model.parameters() if value.dim() > 1]
    others = [value for value in model.parameters() if value.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.01)
    return {"adagrad": torch.optim.Adagrad, "counting": Counting}[kind](groups, lr=0.01)


def data() -> TensorDataset:
    features = torch.randn(58, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(features, features[:, :3].argmax(1))


def loss(model: nn.Module, batch: list[Tensor]) -> paceline.Loss:
    return paceline.Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


def train(
    run: paceline.Run, kind: str, killed: str | None = None, point: str = "", given: bool = False
) -> dict[str, Any]:
    """Train; rank 1 dies once at a point of step 6, where `killed` names the file that says so.

    `given`: the model and its optimizer as objects, not as functions that make them.
    """

    def trap(reached: str) -> None:
        if reached == point and run.world.rank == 1 and run._engine.state.position.number == 6:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(str(killed), os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)

    model = make()
    if given:
        run._engine.preparation.prepare_replica(model, optimizer(kind, model))
    else:
        run._engine.preparation.prepare_replica(make, lambda made: optimizer(kind, made))
    fault_points.set_fault(trap if killed is not None else None)
    for step in run.steps(data(), batch_size=12, steps=STEPS, max_grad_norm=0.5):
        step.compute(loss)
    fault_points.set_fault(None)
    replica = run._engine.state.replica
    held = replica.local_state()
    state = replica.state()
    slots = {
        f"{name}/{slot}": value
        for name, entry in state["optimizer"]["state"].items()
        for slot, value in entry.items()
    }
    moved = sum(
        value.numel() * value.element_size()
        for entry in replica.optimizer.state.values()
        for value in entry.values()
        if value.dim()
    )
    return {
        "weights": weights_sha256(state["model"]),
        "optimizer": weights_sha256(dict(sorted(slots.items()))),
        "groups": [group["params"] for group in state["optimizer"]["groups"]],
        "bytes": moved,
        "held": sorted(held.chunks),
        "whole": replica.whole,
        "boxes": all(chunk.bounds == ChunkBounds.whole(chunk.meta.shape) for chunk in held.chunks.values()),
        "recoveries": run._engine.state.recoveries,
    }


def launch(strategy: str, workers: int, kind: str = "adamw", *args: Any, **options: Any) -> tuple[Any, ...]:
    launched = {"shards": 4, "threads": 1, "device": "cpu", **options}
    return paceline.launch(train, kind, *args, strategy=strategy, workers=workers, **launched)


@pytest.mark.parametrize("kind", ["adamw", "adagrad"])
def test_the_bits_are_one_process_and_the_memory_is_a_part(kind: str) -> None:
    (one,) = launch("single", 1, kind)
    three = launch("ddp", 3, kind, tuning=ZERO)
    for worker in three:
        assert worker["weights"] == one["weights"]
        assert worker["optimizer"] == one["optimizer"]
        assert worker["groups"] == one["groups"]
        assert not worker["whole"]
        assert worker["boxes"]
    # The largest of 8 parameters is 1600 of 2163 numbers: nobody can have less than that, and nobody needs more.
    assert sum(worker["bytes"] for worker in three) == one["bytes"]
    largest = 1600 * one["bytes"] // (6 * 40 + 40 + 80 + 1600 + 40 + 120 + 3)
    assert max(worker["bytes"] for worker in three) == largest
    slots = [{key for key in worker["held"] if key.startswith("optimizer/")} for worker in three]
    assert sorted(key for part in slots for key in part) == sorted(
        key for key in one["held"] if key.startswith("optimizer/")
    ), "every slot is held once"
    models = [[key for key in worker["held"] if key.startswith("model/")] for worker in (one, *three)]
    assert all(model == models[0] for model in models), "the model is whole on each"


def test_parameters_are_dealt_by_size_and_alike_everywhere() -> None:
    assert deal([5, 1, 9, 5, 4], 2) == [1, 1, 0, 1, 0]
    assert deal([1, 1, 1], 4) == [0, 1, 2]
    loads = [0] * 3
    sizes = list(range(1, 31))
    for size, owner in zip(sizes, deal(sizes, 3), strict=True):
        loads[owner] += size
    assert max(loads) - min(loads) <= 1


def test_an_optimizer_that_counts_in_plain_numbers_is_refused() -> None:
    with pytest.raises(paceline.InputError, match="Counting keeps count = 1 for a parameter"):
        launch("ddp", 2, "counting", tuning=ZERO)


# Behind the point "optimizer" the others update their parts, and wait in vain for the one that is gone.
@pytest.mark.parametrize(("point", "given"), [("backward", False), ("optimizer", True)])
def test_a_lost_part_comes_from_the_last_checkpoint(point: str, given: bool, tmp_path: Path) -> None:
    (one,) = launch("single", 1)
    results = launch(
        "ddp",
        3,
        "adamw",
        str(tmp_path / "killed"),
        point,
        given,
        tuning=ZERO,
        out=tmp_path / "run",
        save_every="4",
    )
    assert (tmp_path / "killed").exists()
    assert {result["weights"] for result in results} == {one["weights"]}
    assert {result["optimizer"] for result in results} == {one["optimizer"]}
    assert len(results[0]["recoveries"]) >= 1

"""What a loop of one's own draws outside of its batches is the same on every worker, resumed, and behind a lost worker."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from tests.fault.survivors import BATCH, Samples, measured, set_off

FIRST, SECOND = 3, 4
Drawn = dict[str, tuple[float, float, float]]


def make() -> nn.Module:
    """Make a model for inputs of any size, with a layer that draws."""
    return nn.Sequential(nn.AdaptiveAvgPool1d(6), nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))


def train(run: paceline.Run, folder: str, faults: Any, until: int | None = None) -> tuple[str, Drawn]:
    """Draw wherever a loop may: a size for each step, a head made anew between two calls, noise behind an update."""
    model, _ = run.prepare(make, lambda made: torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9))
    drawn: Drawn = {}

    def draw(place: str) -> float:
        found = random.random(), float(np.random.rand()), torch.rand(()).item()
        assert drawn.setdefault(place, found) == found, (
            f"{place} draws other numbers when it is done once more"
        )
        return found[-1]

    draw("prepared")
    for call, steps in enumerate((FIRST, SECOND)):
        for step in run.steps(Samples(), batch_size=BATCH, steps=steps, after_epoch=lambda _: None):
            draw(f"step {step.number}")
            size = random.choice((4, 6, 9))
            set_off(run, folder, faults, f"call {call}")
            for features, labels in step:
                scaled = F.interpolate(features[:, None], size=size)
                step.backward(F.cross_entropy(model(scaled)[:, 0], labels, reduction="none"))
            draw(f"batches {step.number}")
            step.apply()
            noise = draw(f"applied {step.number}")
            if not step.again:
                with torch.no_grad():
                    model[3].bias.add_(0.01 * noise)
            if step.number + 1 == until:
                return "", drawn
        draw(f"behind call {call}")
        run.evaluate(Samples(), partial(measured, run, folder, faults))
        model[3].reset_parameters()
        draw(f"measured behind call {call}")
    return run.weights_sha256(), drawn


def launch(folder: Path, faults: Any = (), until: int | None = None, **options: Any) -> Any:
    chosen = {"strategy": "ddp", "workers": 2, "shards": 4, "threads": 1, "device": "cpu", **options}
    return paceline.launch(train, str(folder), faults, until, **chosen)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Drawn]:
    return launch(tmp_path_factory.mktemp("alone"), strategy="single", workers=1)[0]


def test_one_worker_draws_other_numbers_at_each_place(alone: tuple[str, Drawn]) -> None:
    _, drawn = alone
    assert len(drawn) == 1 + 3 * (FIRST + SECOND) + 2 * 2
    assert all(len(set(column)) == len(drawn) for column in zip(*drawn.values(), strict=True))


@pytest.mark.parametrize("until", [FIRST, FIRST + 2], ids=["end of a call", "in a later call"])
def test_two_workers_draw_the_same_and_so_does_the_one_that_goes_on(
    until: int, tmp_path: Path, alone: tuple[str, Drawn]
) -> None:
    weights, drawn = alone
    out = tmp_path / "run"
    for _, found in launch(tmp_path, until=until, out=out):
        assert found == {place: drawn[place] for place in found}
        assert f"applied {until - 1}" in found
    ((resumed, found),) = launch(tmp_path, out=out, resume=True, strategy="single", workers=1)
    assert found == {place: drawn[place] for place in found}
    assert {"prepared", "behind call 0", f"step {until}", "measured behind call 1"} <= set(found)
    assert resumed == weights


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (("call 0", 1, 1, "kill"), {}),
        (("call 1", FIRST + 1, 0, "kill"), {}),
        (("metrics", FIRST, 1, "kill"), {}),
        (("call 1", FIRST + 1, 1, "kill"), {"strategy": "fsdp", "peer_snapshots": 1, "snapshot_every": 2}),
    ],
    ids=["first call", "second call", "measurement between the calls", "second call, sharded"],
)
def test_a_worker_killed_changes_no_draw(
    fault: Any, options: dict[str, Any], tmp_path: Path, alone: tuple[str, Drawn]
) -> None:
    weights, drawn = alone
    results = launch(tmp_path, [fault], **options)
    assert set(tmp_path.glob("fault-*"))
    assert {found for found, _ in results} == {weights}
    for _, found in results:
        assert found == {place: drawn[place] for place in found}
        assert f"applied {FIRST + SECOND - 1}" in found


def add_noise(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.add_(0.1 * torch.randn_like(parameter))


def compute(run: paceline.Run) -> str:
    """Take whole steps, as a Task does, with noise on the gradients and a rate that is drawn."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer.register_step_pre_hook(add_noise)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: random.random() if step else 1.0)
    run.prepare(model, optimizer, scheduler=schedule)
    for step in run.steps(Samples(), batch_size=BATCH, steps=3):
        step.compute(
            lambda model, batch: paceline.Loss.mean(
                F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            )
        )
    return run.weights_sha256()


def test_what_an_update_draws_is_the_same_on_every_worker() -> None:
    options: Any = {"shards": 4, "threads": 1, "device": "cpu"}
    (alone,) = paceline.launch(compute, strategy="single", workers=1, **options)
    assert paceline.launch(compute, strategy="ddp", workers=2, **options) == (alone, alone)

"""An optimizer whose state no checkpoint could hold: known behind its first step, not when everything was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss
from paceline.errors import InputError


def train(run: paceline.Run, seen: Path) -> int:
    run.prepare(
        lambda: nn.Sequential(nn.Embedding(8, 6, sparse=True), nn.Linear(6, 1)),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    made = 0

    def loss(model: Any, batch: list[Tensor]) -> Loss:
        return Loss.mean(model(batch[0]).square().sum(1))

    for step in run.steps(TensorDataset(torch.arange(8).repeat(4)), batch_size=8, epochs=1):
        step.compute(loss)
        made += 1
        seen.write_text(f"{made}")
    return made


@pytest.mark.parametrize("kind", ["single", "ddp", "parts"])
def test_a_sparse_momentum_is_refused_after_the_first_step(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"single": {}, "ddp": {"strategy": "ddp", "workers": 2}}.get(
        kind, {"strategy": "ddp", "workers": 2, "tuning": {"shard_optimizer": True}}
    )
    with pytest.raises(InputError, match="SGD keeps momentum_buffer of a parameter as a sparse tensor"):
        paceline.launch(
            train, tmp_path / "seen", out=tmp_path / "run", shards=2, threads=1, device="cpu", **options
        )
    assert (tmp_path / "seen").read_text() == "1"


class Mixed(torch.optim.Optimizer):
    """Two optimizers in one, whose state has two parts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})
        held = self.param_groups[0]["params"]
        self.parts = [torch.optim.SGD(held[:1], lr=0.01), torch.optim.AdamW(held[1:], lr=0.02)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.parts:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {f"{place}": one.state_dict() for place, one in enumerate(self.parts)}


def mixed(run: paceline.Run, seen: Path) -> int:
    run.prepare(lambda: nn.Linear(4, 1), lambda model: Mixed(model.parameters()))
    for step in run.steps(TensorDataset(torch.ones(32, 4)), batch_size=8, epochs=1):
        step.compute(lambda model, batch: Loss.mean(model(batch[0]).square().sum(1)))
        seen.write_text(f"{step.number + 1}")
    return int(seen.read_text())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_state_of_another_form_is_refused_after_the_first_step(workers: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": workers, "shards": 2, "threads": 1, "device": "cpu"}
    with pytest.raises(InputError, match=r"Mixed\.state_dict\(\) has another form than torch's"):
        paceline.launch(mixed, tmp_path / "seen", **options)
    assert (tmp_path / "seen").read_text() == "1"


def test_a_run_that_saves_nothing_may_have_it(tmp_path: Path) -> None:
    assert paceline.launch(train, tmp_path / "seen", shards=2, threads=1, device="cpu") == (4,)

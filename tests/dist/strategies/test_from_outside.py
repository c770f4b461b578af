"""A sharded strategy from outside, by name: the one that CONTRIBUTING shows, as it stands."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import launch
from paceline.errors import InputError

PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"
STRATEGY = "take_turns_of_the_page:TakeTurns"


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put the page's module where Python finds it, and return the strategy's name."""
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "take_turns_of_the_page.py").write_text(found)
    monkeypatch.syspath_prepend(str(tmp_path))
    return STRATEGY


def train(run: paceline.Run, steps: int, killed: bool) -> tuple[bool, str]:
    """Train a while; return whether this worker held all of the state, and the weights."""
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    model, _ = run.prepare(made, torch.optim.AdamW(made.parameters(), lr=0.01))
    held = len(run._engine.state.replica.local_state().chunks)
    data = TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(2)))
    for step in run.steps(data, batch_size=8, steps=steps):
        for (x,) in step:
            losses = model(x).square()
            step.backward(losses.sum(), len(losses))
        if killed and step.number == 3 and run.world.rank == 1 and not run._engine.state.recoveries:
            os.kill(os.getpid(), signal.SIGKILL)
        step.apply()
    return held < len(made.state_dict()), run.weights_sha256()


def run_it(strategy: str, workers: int, steps: int = 6, *, killed: bool = False, **options: Any) -> Any:
    return launch(
        train, steps, killed, strategy=strategy, workers=workers, shards=3, threads=1, device="cpu", **options
    )


def test_it_is_one_process_to_the_bit_also_resumed_and_after_a_lost_worker(
    on_path: str, tmp_path: Path
) -> None:
    ((_, alone),) = run_it("single", 1)
    results = run_it(on_path, 3)
    assert {weights for _, weights in results} == {alone}
    assert [part for part, _ in results] == [False, True, True]
    run_it(on_path, 2, steps=3, out=tmp_path / "out")
    assert {weights for _, weights in run_it("ddp", 2, out=tmp_path / "out", resume=True)} == {alone}
    survived = run_it(on_path, 3, killed=True, peer_snapshots=1, snapshot_every=1)
    assert {weights for _, weights in survived} == {alone}


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"no_such_module:Strategy.*was not found"):
        run_it("no_such_module:Strategy", 1)

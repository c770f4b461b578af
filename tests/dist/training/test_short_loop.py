"""The shape of a plain loop in real processes: the same bits for any number of workers, and after one of them is killed."""

from __future__ import annotations

import difflib
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import paceline

EXAMPLES = Path(__file__).parents[3] / "examples"


def imported(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def example(run: paceline.Run) -> str:
    imported("paceline_loop").main(run)
    return run.weights_sha256()


def test_few_lines_make_a_plain_loop_one_of_paceline() -> None:
    plain, ours = (
        (EXAMPLES / f"{name}.py").read_text().splitlines() for name in ("plain_loop", "paceline_loop")
    )
    changed = [line[0] for line in difflib.unified_diff(plain, ours, lineterm="", n=0)][2:]
    assert 38 <= len(plain) <= 45
    assert (changed.count("+"), changed.count("-")) == (7, 5)


def test_the_examples_train(capfd: pytest.CaptureFixture[str]) -> None:
    imported("plain_loop").main()
    plain = capfd.readouterr().out.split()
    assert float(plain[-1]) > 0.75
    one = paceline.launch(example, workers=1, shards=4, threads=1, device="cpu")
    alone = capfd.readouterr().out
    several = paceline.launch(example, workers=3, shards=4, threads=1, device="cpu")
    assert capfd.readouterr().out == alone
    assert set(several) == set(one)
    assert float(alone.split()[-1]) > 0.75


def points() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(44, 4, generator=made), torch.randint(3, (44,), generator=made))


def train(run: paceline.Run, folder: str, victim: int | None, stops: int | None) -> list[Any]:
    """Train in epochs, average the weights, step a schedule an epoch; a worker is killed between update and schedule."""
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader: Any = DataLoader(points(), batch_size=16, shuffle=True)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    by_step: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    model, optimizer, loader, by_step = run.prepare(model, optimizer, loader, by_step)
    run.register("by epoch", schedule)
    average = run.register("average", AveragedModel(model))
    rates = []
    for _ in range(3):
        for step in loader:
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            mark = Path(folder) / "killed"
            if step.number == 4 and run.world.rank == victim and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            by_step.step()
            average.update_parameters(model)
            rates.append(optimizer.param_groups[0]["lr"])
            # What one worker alone has seen ends the call on all.
            run.stop(stops is not None and step.number >= stops and run.world.rank == run.world.size - 1)
        if stops is not None and step.number >= stops:
            break
        schedule.step()
    update_bn(DataLoader(points(), batch_size=44), average)
    number = run._engine.state.position.number
    return [
        run.weights_sha256(), rates[-1], number, int(average.n_averaged),
        [one.sum().item() for one in average.state_dict().values()],
    ]  # fmt: skip


def launch(folder: Path, victim: int | None = None, stops: int | None = None, **options: Any) -> list[Any]:
    folder.mkdir()
    out = folder / "run"
    found = paceline.launch(
        train, str(folder), victim, stops, shards=4, threads=1, device="cpu", out=out, **options
    )
    assert all(one == found[0] for one in found)
    return list(found[0])


def test_any_number_of_workers_and_one_that_is_killed(tmp_path: Path) -> None:
    one = launch(tmp_path / "one", workers=1)
    assert one[2:4] == [9, 9]
    assert launch(tmp_path / "killed", victim=1, workers=3) == one
    assert (tmp_path / "killed" / "killed").exists()


def test_what_one_worker_says_stops_all_behind_the_same_step(tmp_path: Path) -> None:
    stopped = launch(tmp_path / "one", workers=1, stops=4)
    assert stopped[2] == 5
    assert launch(tmp_path / "killed", victim=0, stops=4, workers=3) == stopped
    assert (tmp_path / "killed" / "run" / "checkpoints" / "step-5").is_dir()

"""Orders, streams with states and parts in real workers: the bits of one, though some are killed and the run is resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import paceline
from paceline.data import Bucketed, Parts
from paceline.verify.receipts.audit import audit
from tests.unit.training.test_stream_states import Pairs

SAMPLES = 60


class Some(Sampler[int]):
    """A sampler of somebody's own."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES)[:44].tolist()


def opened(part: int) -> Iterator[Any]:
    for number in range(5 + part):
        yield torch.full((4,), part / 10), torch.tensor([number / 10]) + torch.rand(1)


def sources() -> list[tuple[Any, dict[str, Any]]]:
    made = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=made), torch.randn(SAMPLES, 1, generator=made))
    return [
        (DataLoader(data, batch_size=8, sampler=Some()), {}),
        (data, {"batch_size": 8, "order": Bucketed([one % 11 for one in range(SAMPLES)], 8)}),
        (Pairs(), {"batch_size": 8}),
        (Parts(range(9), opened, lengths=[5 + part for part in range(9)], buffer=3), {"batch_size": 8}),
    ]


def train(run: paceline.Run, last: int, killed: str | None) -> str:
    model = nn.Linear(4, 1)
    nn.init.ones_(model.weight)
    model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    for call, (data, options) in enumerate(sources()):
        for step in run.steps(data, steps=last if call == 3 else 10, **options):
            marker = Path(killed or "") / str(call)
            if (
                killed
                and call != 1
                and step.number == 10 * call + 4
                and run.world.rank == 1
                and not marker.exists()
            ):
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            for x, y in step:
                losses = (model(x) - y).square()
                step.backward(losses.sum(), len(losses))
            step.apply()
    return run.weights_sha256()


def test_own_data_gives_the_bits_of_one_worker(tmp_path: Path) -> None:
    options: dict[str, Any] = {"shards": 4, "threads": 1, "device": "cpu"}
    (wanted,) = paceline.launch(train, 16, None, strategy="single", **options)
    out, killed = tmp_path / "run", tmp_path / "killed"
    killed.mkdir()
    options |= {"strategy": "ddp", "out": out}
    paceline.launch(train, 7, str(killed), workers=3, **options)
    assert sorted(path.name for path in killed.iterdir())[:2] == ["0", "2"]
    found = paceline.launch(train, 16, None, workers=2, resume=True, **options)
    assert set(found) == {wanted}
    report = audit(out)
    assert report.holds
    assert (report.steps, report.lost, report.repeated) == (46, 0, 0)

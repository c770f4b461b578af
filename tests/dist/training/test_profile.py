"""`--profile`: a table that adds up to the step, and a trace that other tools read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline.errors import InputError
from paceline.observe import Profiled, from_json
from paceline.training.options import RunOptions
from paceline.world import spans

SLOW_S = 0.02


class _Slow(Dataset[Tensor]):
    """Takes its time for each sample, so that reading takes at least that."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(SLOW_S / 8)
        return torch.full((4,), float(index))


def train(run: paceline.Run, steps: int) -> None:
    model = nn.Linear(4, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    for step in run.steps(_Slow(), batch_size=16, steps=steps, max_grad_norm=1.0):
        for batch in step:
            time.sleep(SLOW_S * (1 + run.world.rank))  # so that rank 0 waits
            step.backward(paceline.Loss.mean(model(batch).square()[:, 0]))
        step.apply()


def launch(out: Path, workers: int, steps: int) -> list[Any]:
    paceline.launch(train, steps, workers=workers, device="cpu", out=out, profile=True)
    return [from_json(line) for line in (out / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_table_adds_up_and_the_trace_has_its_spans(tmp_path: Path, workers: int) -> None:
    out = tmp_path / "run"
    began = time.perf_counter()
    events = launch(out, workers, 12)
    took = time.perf_counter() - began
    (profiled,) = [one for one in events if isinstance(one, Profiled)]
    assert profiled.steps == 5
    assert set(profiled.host_s) == {*spans.SPANS, "other"}
    assert profiled.device_s == {}
    assert sum(profiled.host_s.values()) * 5 < took  # no moment counts twice
    share = 16 // workers
    assert profiled.host_s["data"] >= share * SLOW_S / 8
    assert profiled.host_s["forward"] >= SLOW_S
    assert all(profiled.host_s[name] > 0 for name in ("backward", "reduction", "optimizer"))
    assert (profiled.host_s["waiting"] > 0) == (workers > 1)

    rows = (out / "profile" / "table.txt").read_text().splitlines()
    assert [line.split()[0] for line in rows[2:-1]] == [*spans.SPANS, "other", "step"]
    assert rows[-2].endswith("100 %")

    trace = json.loads((out / "profile" / "trace.json").read_text())["traceEvents"]
    named = [one["name"] for one in trace if one["name"].startswith("paceline: ")]
    assert named.count("paceline: optimizer") == 2 * 3  # clipping, and the update that may be replayed
    assert named.count("paceline: forward") == 3
    assert any(one["name"] == "aten::linear" for one in trace)


def test_a_run_that_ends_too_soon_says_so_and_one_that_ends_early_has_the_table(tmp_path: Path) -> None:
    events = launch(tmp_path / "short", 1, 3)
    notes = [one.text for one in events if one.kind == "note"]
    assert any("--profile measured nothing: the first 3 steps warm up" in text for text in notes)
    assert not (tmp_path / "short" / "profile").exists()

    (profiled,) = [one for one in launch(tmp_path / "early", 1, 5) if isinstance(one, Profiled)]
    assert (profiled.steps, profiled.path) == (2, "")
    assert not (tmp_path / "early" / "profile" / "trace.json").exists()


def test_a_profile_needs_a_folder() -> None:
    with pytest.raises(InputError, match=r"--profile needs a folder to write into\. Give --out\."):
        RunOptions(profile=True)

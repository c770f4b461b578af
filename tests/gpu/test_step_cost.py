"""What a step on a GPU must not cost: a second copy of the gradients, or a wait of the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Loss, Run, launch
from paceline.observe import Profiled, from_json
from paceline.reduce.norms import CHUNK, norms

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_norms_do_not_depend_on_where_a_gradient_lies_and_copy_one_chunk_at_most(dtype: torch.dtype) -> None:
    sizes = [3, 1000, 4096, 5 * CHUNK + 4, CHUNK, 7]
    draw = torch.Generator("cuda").manual_seed(1)
    values = torch.randn(sum(sizes), device="cuda", generator=draw).to(dtype)
    expected = norms([one.clone() for one in values.split(sizes)])
    for offset in range(8):
        room = torch.zeros(offset + len(values), device="cuda", dtype=dtype)
        room[offset:] = values
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = norms(list(room[offset:].split(sizes)))
        assert torch.cuda.max_memory_allocated() - before <= CHUNK * values.element_size() + 2**20
        assert [one.item() for one in found] == [one.item() for one in expected]


def losses_without_waiting(run: Run, optimizer: dict[str, Any]) -> list[float]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    run._engine.preparation.prepare_replica(
        model, lambda made: torch.optim.AdamW(made.parameters(), lr=1e-3, **optimizer)
    )
    data = TensorDataset(torch.randn(256, 12), torch.randint(0, 4, (256,)))

    def loss(model: nn.Module, batch: Any) -> Loss:
        inputs, targets = batch
        return Loss.mean(nn.functional.cross_entropy(model(inputs), targets, reduction="none"))

    results = []
    try:
        for step in run.steps(data, batch_size=32, steps=8, max_grad_norm=0.5):
            # Steps 5, 6 and 7 of the eight: those before warm up, and 1, 2, 4 and 8 compare all buffers by value.
            torch.cuda.set_sync_debug_mode("error" if step.number in (4, 5, 6) else "default")
            results.append(step.compute(loss))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [one.loss for one in results]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ({}, {"shards": 1}),
        ({"fused": True}, {"shards": 4, "precision": "bf16"}),
        # The scaler of fp16 asks the GPU by itself whether a step overflowed, unless the optimizer is a fused one.
        ({"fused": True}, {"shards": 1, "precision": "fp16"}),
    ],
    ids=["fp32", "bf16, 4 shards", "fp16, fused"],
)
def test_a_step_does_not_wait_for_the_gpu(optimizer: dict[str, Any], options: dict[str, Any]) -> None:
    (losses,) = launch(losses_without_waiting, optimizer, strategy="single", device="cuda", **options)
    assert len(losses) == 8
    assert all(0 < one < 10 for one in losses)


def profiled_steps(run: Run) -> None:
    model = nn.Linear(64, 64)
    run._engine.preparation.prepare_replica(model, lambda made: torch.optim.SGD(made.parameters(), lr=0.1))
    for step in run.steps(TensorDataset(torch.randn(64, 64)), batch_size=16, steps=12):
        step.compute(lambda model, batch: Loss.mean(model(batch[0]).square().mean(1)))


def test_a_profile_has_the_time_of_the_gpu_and_its_kernels(tmp_path: Path) -> None:
    launch(profiled_steps, strategy="single", device="cuda", out=tmp_path / "run", profile=True)
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    (profiled,) = [one for one in map(from_json, lines) if isinstance(one, Profiled)]
    assert all(profiled.device_s[name] > 0 for name in ("forward", "backward", "optimizer"))
    trace = json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())["traceEvents"]
    assert any(one.get("cat") == "kernel" for one in trace)


def square(model: nn.Module, batch: Any) -> Loss:
    return Loss.mean(model(batch[0]).square().mean(1))


def profiled_capture(run: Run) -> int:
    model = nn.Linear(64, 64)
    run._engine.preparation.prepare_replica(model, lambda made: torch.optim.SGD(made.parameters(), lr=0.1))
    for step in run.steps(TensorDataset(torch.randn(64, 64)), batch_size=16, steps=14):
        step.compute(square)
    graphs = run._engine.state.replica.graphs
    return 0 if graphs is None else graphs.replayed


def test_a_step_is_captured_while_it_is_profiled(tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cuda", "cuda_graph": "on", "out": tmp_path / "run", "profile": True}
    (replayed,) = launch(profiled_capture, strategy="single", **options)
    assert replayed > 0
    assert (tmp_path / "run" / "profile" / "table.txt").exists()

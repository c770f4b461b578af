"""fsdp whose rows and optimizer state live in host memory: the GPU computes, and the bits are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import InputError, Loss, Run, launch
from paceline.checkpoint import weights_sha256
from paceline.strategies.tuning import Tuning
from tests.dist.bitwise.training import Case, all_bits

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")

CASES = [
    Case(task="Pictures", shards=4, optimizer="momentum", max_grad_norm=0.5),
    Case(task="Sentences", shards=3, optimizer="adamw", micro_batch=4, max_grad_norm=0.1),
    Case(task="Tied", shards=5, optimizer="adamw", precision="bf16"),
    Case(task="Pictures", shards=4, optimizer="adamw", precision="fp16"),
]
AWAY: dict[str, Any] = {
    "strategy": "fsdp",
    "workers": 2,
    "device": "cuda",
    "backend": "gloo",
    "tuning": Tuning(offload=True),
}


def test_the_bits_are_those_of_one_process() -> None:
    (alone,) = launch(all_bits, CASES, strategy="single", shards=5, device="cuda")
    for found in launch(all_bits, CASES, shards=5, **AWAY):
        for case, mine, expected in zip(CASES, found, alone, strict=True):
            assert mine == expected, case


class Blocks(nn.Module):
    """A chain of layers, and a buffer that is no row of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        self.register_buffer("scale", torch.full((512,), 0.5))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.layers(values) * self.scale
        return scaled


def loss(model: nn.Module, batch: Any) -> Loss:
    return Loss.mean(model(batch[0]).pow(2))


def train(run: Run, steps: int, fused: bool) -> dict[str, Any]:
    torch.cuda.empty_cache()
    replica = run._engine.preparation.prepare_replica(
        Blocks,
        lambda made: torch.optim.AdamW(made.parameters(), lr=0.01, fused=fused),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    )
    data = TensorDataset(torch.randn(64, 512, generator=torch.Generator().manual_seed(2)))
    for step in run.steps(data, batch_size=16, steps=steps, max_grad_norm=0.5):
        step.compute(loss)
    large = [chunk.values for chunk in replica.local_state().chunks.values() if chunk.values.numel() > 1000]
    found = {
        "allocated": torch.cuda.memory_allocated(),
        "devices": {values.device.type for values in large},
        "held": sum(values.numel() * values.element_size() for values in large),
    }
    state = replica.state()
    kept = {
        f"{name}.{slot}": value
        for name, slots in state["optimizer"]["state"].items()
        for slot, value in slots.items()
    }
    return {**found, "weights": weights_sha256(state["model"]), "optimizer": weights_sha256(kept)}


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_checkpoint_of_host_memory_goes_on_anywhere(fused: bool, tmp_path: Path) -> None:
    (alone,) = launch(train, 6, fused, strategy="single", shards=2, device="cuda")
    here = launch(train, 3, fused, **{**AWAY, "tuning": Tuning()}, shards=2)
    away = launch(train, 3, fused, shards=2, out=tmp_path / "run", **AWAY)
    assert here[0]["devices"] == {"cuda"}
    for mine, other in zip(away, here, strict=True):
        assert mine["devices"] == {"cpu"}
        # Weights and both averages have left the GPU, gradients and the libraries' own memory have not.
        assert other["allocated"] - mine["allocated"] > 0.95 * mine["held"]
        assert mine["weights"] == other["weights"]
    for options in (AWAY, {**AWAY, "strategy": "ddp", "tuning": Tuning()}):
        for found in launch(train, 6, fused, shards=2, out=tmp_path / "run", resume=True, **options):
            assert found["weights"] == alone["weights"]
            assert found["optimizer"] == alone["optimizer"]


def test_one_worker_has_nothing_to_offload() -> None:
    with pytest.raises(InputError, match="nothing is sharded among one worker"):
        launch(train, 1, False, **{**AWAY, "workers": 1})

"""States of runs for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.compare import same

PART, EXTRA_STATE, MANIFEST = "part-0.safetensors", "extra_state.pt", "manifest.json"


def run_state(step: int, width: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(width, width, generator=generator)
    return {
        "model": {"layer.weight": weight, "layer.bias": torch.full((width,), float(step))},
        "optimizer": {
            "state": {
                "layer.weight": {"step": torch.tensor(float(step)), "exp_avg": weight * 2, "count": step}
            },
            "groups": [
                {
                    "lr": 0.1,
                    "betas": (0.9, 0.999),
                    "amsgrad": False,
                    "foreach": None,
                    "params": ["layer.weight"],
                }
            ],
        },
        "scheduler": {"last_epoch": step, "_last_lr": [0.1]},
        "scaler": None,
        "position": {"epoch": step // 10, "step": step},
        "meta": {"task": "digits", "seed": 3, "shards": 4, "strategy": "ddp"},
    }


def refuse(path: Path, reason: str) -> None:
    raise AssertionError(f"{path} was reported as damaged: {reason}")


def assert_same(left: Any, right: Any) -> None:
    assert same(left, right), f"{left}\ndiffers from\n{right}"

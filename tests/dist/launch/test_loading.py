"""What workers find loaded when they are forked, and what they take apart at their end."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import paceline

# A worker imports this module before it makes its `Run`: so far it has what the fork server had.
_LOADED = frozenset(sys.modules)


class _Held:
    """Something that is to be cleaned up at the end of a worker."""


def train_and_name_imports(run: paceline.Run, folder: str) -> list[str]:
    """Take a step, and return what the worker had to import of ours for it."""
    held = _Held()
    weakref.finalize(held, (Path(folder) / str(run.world.rank)).write_text, "cleaned up")
    vars(run)["held"] = held
    layer = torch.nn.Linear(2, 1)
    model, _ = run.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    for step in run.steps(TensorDataset(torch.ones(2, 2)), batch_size=2, steps=1):
        for (x,) in step:
            step.backward(model(x).sum(), len(x))
        step.apply()
    return sorted(name for name in sys.modules.keys() - _LOADED if name.startswith("paceline.strategies"))


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("ddp", {}), ("ddp", {"tuning": {"shard_optimizer": True}}), ("fsdp", {}), ("ps", {})],
)
def test_the_fork_server_has_the_strategy(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    found = paceline.launch(
        train_and_name_imports,
        str(tmp_path),
        strategy=strategy,
        workers=2,
        threads=1,
        device="cpu",
        **options,
    )
    assert found[:2] == ([], [])
    assert [path.read_text() for path in sorted(tmp_path.iterdir())][:2] == ["cleaned up"] * 2

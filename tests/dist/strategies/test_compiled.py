"""`--compile`: loss and model are really compiled, together, once for each shape, with the same bits for everybody."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from tests.dist.strategies import compiled_runs as runs
from tests.dist.strategies.compiled_runs import Compiled

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("c++") is None, reason="needs a C++ compiler"
)
SHAPES = 2
README_TASK = Path(__file__).parents[3] / "examples" / "digits_task.py"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compilers costs more than it saves


def train(task: str, workers: int = 1, **options: Any) -> Compiled:
    own = {name: options.pop(name) for name in ("steps", "pieces") if name in options}
    how = {"strategy": "ddp", "shards": 2, "threads": 1, "device": "cpu", "compile": True, **options}
    first, *others = paceline.launch(runs.train, task, kwargs=own, workers=workers, **how)
    for other in others:
        assert other.bits == first.bits
    trained: Compiled = first
    return trained


def test_the_task_of_the_readme_is_one_graph_and_learns_the_same() -> None:
    plain, found = (train(f"{README_TASK}:Digits", steps=3, compile=compiles) for compiles in (False, True))
    assert (plain.functions, found.functions, found.breaks) == (0, 1, [])
    assert found.bits != plain.bits
    # The loss of the third step. Weights are not compared: Adam takes a gradient of rounding errors for one of its full size.
    assert found.loss == pytest.approx(plain.loss, rel=1e-5)


def test_the_bits_are_those_of_any_number_of_workers_and_of_a_resumed_run(tmp_path: Path) -> None:
    alone = train("Everything", strategy="single", pieces=True)
    assert (alone.functions, alone.breaks) == (SHAPES, [])
    assert train("Everything", 2, pieces=True, steps=4, out=str(tmp_path), save_every=4).bits != alone.bits
    # A process that has met the shapes in another order: the short one second, in the middle of an epoch.
    resumed = train("Everything", strategy="single", pieces=True, out=str(tmp_path), resume=True)
    assert resumed.bits == alone.bits


def test_blocks_of_fsdp_are_compiled_inside_of_their_hooks() -> None:
    plain, found = train("Blocks", 2, strategy="fsdp", compile=False), train("Blocks", 2, strategy="fsdp")
    assert found.functions >= SHAPES
    assert found.breaks == []
    for name, tensor in plain.weights.items():
        assert torch.allclose(found.weights[name], tensor, rtol=0, atol=6 * 64 * 2**-23), name


def test_a_loop_of_ones_own_compiles_its_loss_with_the_model() -> None:
    options: dict[str, Any] = {
        "shards": 2,
        "threads": 1,
        "device": "cpu",
        "compile": True,
        "precision": "bf16",
    }
    ((functions, breaks),) = paceline.launch(runs.own_loop, **options)
    assert (functions, breaks) == (SHAPES, [])

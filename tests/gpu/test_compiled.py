"""`--compile` on a GPU: the same bits for one worker and two, in pieces and after a resume, and one graph for each shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from tests.dist.strategies import compiled_runs as runs
from tests.dist.strategies.compiled_runs import Compiled

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")


def train(workers: int, steps: int | None = None, **options: Any) -> Compiled:
    kwargs = {"pieces": True, "steps": steps}
    how = {"strategy": "ddp", "shards": 2, "device": "cuda", "compile": True, **options}
    first, *others = paceline.launch(runs.train, "Everything", kwargs=kwargs, workers=workers, **how)
    for other in others:
        assert other.bits == first.bits
    trained: Compiled = first
    return trained


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_any_number_of_workers_gives_the_bits_of_one(precision: str, tmp_path: Path) -> None:
    alone = train(1, precision=precision)
    assert (alone.functions, alone.breaks) == (2, [])
    assert train(2, precision=precision).bits == alone.bits
    assert train(1, precision=precision, strategy="single").bits == alone.bits
    train(2, steps=4, precision=precision, out=str(tmp_path), save_every=4)
    assert train(1, precision=precision, out=str(tmp_path), resume=True).bits == alone.bits

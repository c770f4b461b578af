"""What receipt and manifest say of weights that lie on a server is what one process's say: tied weights included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import paceline
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from tests.dist.strategies.ordinary import MadeWords, tied

STEPS = 2


class Tied(MadeWords):
    """A model whose last layer shares the first one's weight."""

    def __init__(self) -> None:
        super().__init__(model=tied)


def test_the_hash_of_one_server_is_that_of_one_process(tmp_path: Path) -> None:
    told = []
    for strategy, workers in (("single", 1), ("ps", 2)):
        spec = TrainSpec(task=f"{__name__}:Tied", name="tied", steps=STEPS)
        out = tmp_path / strategy
        options: dict[str, Any] = {"strategy": strategy, "workers": workers, "shards": 4, "out": out}
        (first, *_) = paceline.launch(trainer.main, spec, threads=1, device="cpu", **options)
        receipt = json.loads((out / "receipt.json").read_text())
        manifest = json.loads((out / "checkpoints" / f"step-{STEPS}" / "manifest.json").read_text())
        told.append(
            [
                first["weights_sha256"],
                receipt["weights_sha256"],
                receipt["checkpoints"][str(STEPS)]["weights_sha256"],
                manifest["weights_sha256"],
            ]
        )
    assert len({one for row in told for one in row}) == 1

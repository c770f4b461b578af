"""What every strategy must train. Each job is one line here and one test that reads its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.training.spec import TrainSpec
from tests.contract.strategies import SHARDS

STEPS = 20
FEW = 8
"""Enough for what happens in every step, or in epochs of a few steps."""
HALFWAY = 9
"""Where a run is left and taken up again: in the middle of its second epoch."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, but for the strategy."""

    task: str = "Classify"
    settings: dict[str, str] = field(default_factory=dict)
    steps: int = STEPS
    batch_size: int | None = None
    micro_batch: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def spec(self) -> TrainSpec:
        """Say it as the command line would."""
        return TrainSpec(
            task=f"tests.contract.tasks:{self.task}",
            name=self.task,
            steps=self.steps,
            batch_size=self.batch_size,
            settings=self.settings,
            overrides={} if self.micro_batch is None else {"micro_batch": self.micro_batch},
        )


# What no test reads is not measured.
UNMEASURED = {"measured": "false"}
JOBS = {
    "adamw": Job(),
    "momentum": Job(settings={"optimizer": "momentum", **UNMEASURED}),
    # Nothing divides: 8 steps of 7 samples and one of 5, in shards of 1 and 2.
    "uneven": Job(settings={"samples": "61", **UNMEASURED}, batch_size=7),
    # The last batch has 2 samples for 4 shards: some workers have none.
    "short": Job(settings={"samples": "18", **UNMEASURED}, steps=FEW),
    # No batch is ever whole: the first shard never has a sample.
    "tiny": Job(settings={"samples": "3", **UNMEASURED}, steps=FEW),
    "micro": Job(micro_batch=1, settings=UNMEASURED, steps=FEW),
    "tokens": Job(task="Tokens", micro_batch=3, batch_size=16, settings={"samples": "41"}, steps=FEW),
    "first tokens": Job(task="Tokens", micro_batch=3, batch_size=16, steps=1, settings={"lr": "1.0"}),
    "max_grad_norm": Job(settings={"max_grad_norm": "0.05", "optimizer": "sgd", **UNMEASURED}, steps=FEW),
    "first clip": Job(
        settings={"max_grad_norm": "0.05", "optimizer": "sgd", "dropout": "0.0", **UNMEASURED}, steps=1
    ),
    "schedule": Job(task="Scheduled", settings={"optimizer": "sgd", **UNMEASURED}),
    "auxiliary": Job(task="Balanced", micro_batch=2, batch_size=16, settings={"samples": "41"}, steps=FEW),
    "auxiliary short": Job(task="Balanced", settings={"samples": "3"}, steps=FEW),
    "first auxiliary": Job(task="Balanced", micro_batch=2, batch_size=16, steps=1, settings={"lr": "1.0"}),
    "many shards": Job(task="Balanced", batch_size=16, options={"shards": 2 * SHARDS + 1}, steps=FEW),
}
HALF = Job(task="Scheduled", steps=HALFWAY, settings={"samples": "61"})
WHOLE = Job(task="Scheduled", settings={"samples": "61"})

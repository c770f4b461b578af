"""Tasks and loops for tests of `--compile`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import paceline
from paceline.strategies import compiled
from paceline.training import trainer
from paceline.training.run import engine_of
from paceline.training.spec import TrainSpec

Batch = tuple[Tensor, Tensor]


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(samples, 6, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    )


class Short(paceline.Task):
    """Two steps of 8 samples and one of 4 in each of two epochs, in two shards: two shapes."""

    batch_size, epochs, shards = 8, 2, 2

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_data(self) -> TensorDataset:
        return data(20)

    def eval_data(self) -> TensorDataset:
        return data(11)

    def loss(self, model: nn.Module, batch: Batch) -> paceline.Loss:
        return paceline.Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


class Everything(Short):
    """Buffers, random numbers, and a term with a backward pass of its own."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 3)
        )

    def loss(self, model: nn.Module, batch: Batch) -> paceline.Loss:
        scores = model(batch[0])
        small = paceline.Loss(0.1 * scores.pow(2).sum(), (batch[1] > 0).sum())
        return paceline.Loss.mean(F.cross_entropy(scores, batch[1], reduction="none"), small=small)


class Blocks(Short):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8),
            *(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True) for _ in range(2)),
            nn.Linear(8, 3),
        )

    def loss(self, model: nn.Module, batch: Batch) -> paceline.Loss:
        scores = model(batch[0][:, None])[:, 0]
        return paceline.Loss.mean(F.cross_entropy(scores, batch[1], reduction="none"))


class Compiled(NamedTuple):
    functions: int
    breaks: list[str]
    bits: str
    weights: dict[str, Tensor]
    loss: float


def train(run: paceline.Run, task: str, steps: int | None = None, *, pieces: bool = False) -> Compiled:
    """Train a task; in `pieces`, of however few parameters."""
    if pieces:
        compiled.SMALLEST_PIECE = 64  # a process of its own: nobody else sees it
    from paceline.compat import graphs  # the compiler: for the workers alone

    before, _ = graphs.captured()
    reference = task if ":" in task else f"{__name__}:{task}"
    result = trainer.main(run, TrainSpec(task=reference, name=task, steps=steps))
    weights = {name: one.clone() for name, one in engine_of(run).state.replica.state()["model"].items()}
    functions, breaks = graphs.captured()
    return Compiled(functions - before, breaks, result["weights_sha256"], weights, result["loss"])


def own_loop(run: paceline.Run) -> tuple[int, list[str]]:
    """Return what is captured of a loop of its own."""
    from paceline.compat import graphs

    task = Short()
    given = task.model()
    model, _ = run.prepare(given, task.optimizer(given))
    loss = run.compile(task.loss)
    for step in run.steps(task.train_data(), batch_size=8, epochs=2):
        for batch in step:
            step.backward(loss(model, batch))
        step.apply()
    return graphs.captured()

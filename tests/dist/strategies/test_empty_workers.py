"""Workers with fewer batches than others, or none, go on with them whatever the model was called for in between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import InputError, Loss, Run, Task

# Samples and batch size by shards. The last batch of an epoch leaves one of two workers without samples; with three shards
# one has two batches of the others, too.
SIZES = {2: (3, 2), 3: (26, 24)}
TOGETHER = ["inside", "behind the batches", "behind the step", "raised"]


def data(samples: int = 26) -> TensorDataset:
    rows = torch.randn(samples, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(rows, rows[:, :3].argmax(1))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Blocks(nn.Module):
    """Blocks that are gathered one by one, and a head that stays after a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        outputs: Tensor = self.head(rows)
        return outputs


class Measured(Task):
    """Measures before a step in which a worker is empty."""

    batch_size = 24
    epochs = 6
    shards = 3
    eval_every = 3

    def model(self) -> nn.Module:
        return layers()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_data(self) -> TensorDataset:
        return data()

    def eval_data(self) -> TensorDataset:
        return data(13)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


@pytest.fixture(scope="module")
def measured() -> str:
    found: str = paceline.train(Measured, strategy="single", progress=False).weights_sha256
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pp", "ps"])
def test_a_worker_is_empty_behind_an_evaluation(strategy: str, measured: str) -> None:
    result = paceline.train(
        Measured, strategy=strategy, workers=2, hang_timeout=5, max_restarts=0, progress=False
    )
    assert result.weights_sha256 == measured


def look(model: nn.Module, rows: Tensor) -> None:
    with torch.no_grad():
        model(rows)


def fail(model: nn.Module, rows: Tensor) -> None:
    """Raise in the middle of a forward pass."""
    handle = model.get_submodule("blocks.1.1").register_forward_hook(lambda *_: 1 / 0)
    try:
        model(rows)
    except ZeroDivisionError:
        handle.remove()


def train(run: Run, habits: list[str], samples: int, batch_size: int) -> str:
    model = Blocks()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = data(4).tensors[0]
    for step in run.steps(data(samples), batch_size=batch_size, epochs=4):
        for batch in step:
            losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            step.backward(losses.sum(), len(losses))
            if "inside" in habits:
                look(model, batch[0])
        if "behind the batches" in habits:
            look(model, rows)
        step.apply()
        if "behind the step" in habits:
            look(model, rows)
        if "raised" in habits:
            fail(model, rows)
        if "to inputs" in habits:
            given = rows.clone().requires_grad_()
            torch.autograd.grad(model(given).sum(), given)
    return run.weights_sha256()


def launch(strategy: str, habits: list[str], shards: int) -> set[str]:
    workers = 1 if strategy == "single" else 2
    return set(
        paceline.launch(
            train,
            habits,
            *SIZES[shards],
            strategy=strategy,
            workers=workers,
            shards=shards,
            hang_timeout=5,
            max_restarts=0,
        )
    )


@pytest.fixture(scope="module")
def trained() -> dict[int, set[str]]:
    return {shards: launch("single", [], shards) for shards in SIZES}


@pytest.mark.parametrize("shards", SIZES)
@pytest.mark.parametrize(
    "habits",
    [["inside"], ["behind the batches"], ["behind the step"], ["raised"], [*TOGETHER, "to inputs"]],
    ids=" and ".join,
)
def test_fsdp_goes_on_behind_calls_of_the_loop(
    habits: list[str], shards: int, trained: dict[int, set[str]]
) -> None:
    assert launch("fsdp", habits, shards) == trained[shards]


@pytest.mark.parametrize("strategy", ["ddp", "ps"])
def test_so_do_the_others(strategy: str, trained: dict[int, set[str]]) -> None:
    assert launch(strategy, [*TOGETHER, "to inputs"], 3) == trained[3]


def twice(run: Run) -> None:
    model = layers()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(data(), batch_size=13, epochs=1):
        for rows, classes in step:
            step.backward(F.cross_entropy(model(rows), classes, reduction="none"))
            step.backward(model(rows).square().sum(1))
        step.apply()


@pytest.mark.parametrize(("strategy", "workers", "shards"), [("fsdp", 2, 3), ("fsdp", 3, 5), ("ddp", 2, 3)])
def test_a_second_backward_of_a_batch_is_refused(strategy: str, workers: int, shards: int) -> None:
    with pytest.raises(InputError, match="more often than batches were given"):
        paceline.launch(
            twice, strategy=strategy, workers=workers, shards=shards, hang_timeout=5, max_restarts=0
        )

"""Steps replayed from a CUDA graph: the bits of steps that are computed, and no replay of what a graph cannot follow."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from paceline import InputError, Loss, Run, launch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")


def layers(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), *extra, nn.Linear(32, 5))


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(200, 12, generator=made), torch.randint(0, 5, (200,), generator=made))


def plain(model: nn.Module, batch: Any) -> Loss:
    return Loss.mean(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"))


@dataclass
class Temperature:
    """A loss with a number that something else may change."""

    value: float = 1.0
    calls: int = 0
    counts: bool = False
    reads: list[float] = field(default_factory=list)

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        if self.counts:
            self.calls += 1
        scale = self.value + 0.01 * self.calls
        return Loss.mean(nn.functional.cross_entropy(model(batch[0]) * scale, batch[1], reduction="none"))


def drops_on_the_host(model: nn.Module, batch: Any) -> Loss:
    kept = 1.0 if random.random() < 0.5 else 0.5
    return Loss.mean(nn.functional.cross_entropy(model(batch[0]) * kept, batch[1], reduction="none"))


def waits(model: nn.Module, batch: Any) -> Loss:
    output = model(batch[0])
    scale = 2.0 if output.abs().sum().item() > 10 else 1.0
    return Loss.mean(nn.functional.cross_entropy(output * scale, batch[1], reduction="none"))


Found = tuple[dict[str, Tensor], list[float], int, bool]


def train(
    run: Run,
    loss: Callable[[nn.Module, Any], Loss],
    extra: tuple[nn.Module, ...] = (),
    kind: str = "adamw",
    clip: float | None = 0.3,
    batch_size: int = 32,
    change: int = 0,
) -> Found:
    model = layers(*extra)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=0.01)
        if kind == "adamw"
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step))
    run.prepare(model, optimizer, scheduler=scheduler)
    losses = []
    for step in run.steps(data(), batch_size=batch_size, epochs=8, max_grad_norm=clip):
        if step.number == change and isinstance(loss, Temperature):
            loss.value = 2.0
        losses.append(step.compute(loss).loss)
    graphs = run._engine.state.replica.graphs
    state = {name: one.cpu() for name, one in model.state_dict().items()}
    return state, losses, graphs.replayed if graphs is not None else 0, bool(graphs and graphs._over)


def both(*arguments: Any, shards: int = 1, **more: Any) -> tuple[Found, Found]:
    options: dict[str, Any] = {"strategy": "single", "device": "cuda", "shards": shards, **more}
    eager, replayed = (launch(train, *arguments, cuda_graph=mode, **options)[0] for mode in ("off", "on"))
    assert eager[2] == 0
    return eager, replayed


def assert_equal(eager: Found, replayed: Found) -> None:
    assert eager[1] == replayed[1]
    assert all(torch.equal(one, replayed[0][name]) for name, one in eager[0].items())


@pytest.mark.parametrize(
    ("shards", "extra", "kind", "clip", "batch_size", "more"),
    [
        (1, (), "adamw", 0.3, 25, {}),
        (4, (nn.Dropout(0.3),), "adamw", 0.3, 32, {}),
        (1, (nn.BatchNorm1d(32), nn.Dropout(0.1)), "sgd", None, 32, {}),
        (2, (nn.Dropout(0.3),), "adamw", 0.3, 32, {"micro_batch": 8, "precision": "bf16"}),
    ],
    ids=["plain", "shards", "batchnorm", "micro-batches"],
)
def test_replayed_steps_have_the_bits_of_computed_ones(
    shards: int,
    extra: tuple[nn.Module, ...],
    kind: str,
    clip: float | None,
    batch_size: int,
    more: dict[str, Any],
) -> None:
    eager, replayed = both(plain, extra, kind, clip, batch_size, shards=shards, **more)
    assert_equal(eager, replayed)
    assert replayed[2] > 20


@pytest.mark.parametrize(
    "loss", [Temperature(counts=True), drops_on_the_host, waits], ids=["counts", "draws", "waits"]
)
def test_what_a_graph_cannot_follow_is_computed(loss: Callable[[nn.Module, Any], Loss]) -> None:
    eager, replayed = both(loss)
    assert_equal(eager, replayed)
    assert replayed[2] == 0
    assert replayed[3]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_number_that_changes_once_is_followed(compiled: bool) -> None:
    eager, replayed = both(Temperature(), (), "adamw", 0.3, 25, 33, compile=compiled)
    assert_equal(eager, replayed)
    assert replayed[2] > 20


def unseen(model: nn.Module, batch: Any) -> Loss:
    scale = float(os.environ.get("TEST_SCALE", "1"))
    return Loss.mean(nn.functional.cross_entropy(model(batch[0]) * scale, batch[1], reduction="none"))


def change_unseen(run: Run) -> None:
    model = layers()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in run.steps(data(), batch_size=25, epochs=12):
        if step.number == 40:
            os.environ["TEST_SCALE"] = "2"
        step.compute(unseen)


def test_a_change_that_nobody_could_see_ends_the_run() -> None:
    with pytest.raises(InputError, match="computes something else now"):
        launch(change_unseen, strategy="single", device="cuda", cuda_graph="on")

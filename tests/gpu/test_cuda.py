"""What touches CUDA: the same bits on one GPU for any number of workers, fp16 with its scaler, refused kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import InputError, Loss, Run, launch
from tests.dist.bitwise.training import Case, all_bits

# Counting devices starts no CUDA context here: workers are forked from another process anyway.
pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")

CASES = [
    Case(task="Pictures", shards=4, optimizer="momentum", max_grad_norm=0.5),
    Case(task="Sentences", shards=3, optimizer="adamw", micro_batch=4, max_grad_norm=0.1),
    Case(task="Sequences", shards=4, optimizer="adafactor"),
    Case(task="Tied", shards=5, optimizer="adamw", precision="bf16"),
    Case(task="Pictures", shards=4, optimizer="adamw", precision="fp16"),
]


def on_gpu(**options: Any) -> list[dict[str, Any]]:
    by_rank = launch(all_bits, CASES, shards=5, device="cuda", **options)
    assert all(other == by_rank[0] for other in by_rank[1:])
    first: list[dict[str, Any]] = by_rank[0]
    return first


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return on_gpu(strategy="single")


@pytest.mark.parametrize(
    "way", [{"workers": 2}, {"workers": 3}, {"strategy": "dp", "workers": 2}], ids=["ddp-2", "ddp-3", "dp-2"]
)
def test_any_number_of_workers_gives_the_bits_of_one(
    way: dict[str, Any], alone: list[dict[str, Any]]
) -> None:
    for case, found, expected in zip(CASES, on_gpu(**way), alone, strict=True):
        assert found == expected, case


class _Scatter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        return (
            self.layer(values)
            .flatten()
            .put(torch.tensor([0], device=values.device), values[0, :1], accumulate=False)
        )


def use_a_kernel_that_differs(run: Run) -> None:
    model = _Scatter()

    def loss(model: nn.Module, batch: Any) -> Loss:
        return Loss.mean(model(batch[0]))

    run._engine.preparation.prepare_replica(model, lambda made: torch.optim.SGD(made.parameters(), lr=0.1))
    for step in run.steps(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=4, steps=1):
        step.compute(loss)


def test_an_operation_without_a_deterministic_kernel_is_named() -> None:
    with pytest.raises(InputError, match=r"put_ .*no deterministic kernel"):
        launch(use_a_kernel_that_differs, strategy="single", device="cuda")
    launch(use_a_kernel_that_differs, strategy="single", device="cuda", exact="numeric")

"""A total of 16 bits: one over a batch of 48 is 0.2 % off in bfloat16, and no gradient may be."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss


def descend(run: paceline.Run, dtype: torch.dtype, auxiliary: bool) -> list[Tensor]:
    """Take one step of SGD over 48 samples, with the loss of each batch as a total of `dtype`."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    features = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    for step in run.steps(TensorDataset(features, features.argmax(1) % 3), batch_size=48, steps=1):
        for x, y in step:
            scores = model(x)
            loss = F.cross_entropy(scores, y, reduction="sum").to(dtype)
            size = {"size": Loss(scores.square().sum().to(dtype), len(y))} if auxiliary else {}
            step.backward(Loss(loss, len(y), size))
        step.apply()
    return [parameter.detach() for parameter in model.parameters()]


def test_gradients_are_over_the_true_weight() -> None:
    for auxiliary in (False, True):
        made = {
            (dtype, workers): paceline.launch(
                descend, dtype, auxiliary, workers=workers, shards=2, threads=1, device="cpu"
            )
            for dtype, workers in ((torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 2))
        }
        wide, (narrow,) = made[torch.float32, 1][0], made[torch.bfloat16, 1]
        for one, other in zip(narrow, wide, strict=True):
            torch.testing.assert_close(
                one, other, rtol=0, atol=1e-6
            )  # 2e-3 of a gradient of 1 without the correction
        for worker in made[torch.bfloat16, 2]:
            assert all(torch.equal(one, other) for one, other in zip(worker, narrow, strict=True))


def scale_on_a_cpu(run: paceline.Run) -> list[tuple[float, float]]:
    """Return the rate and the weight after each step; the gradient of the second one overflows."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    replica = run._engine.preparation.prepare_replica(
        model,
        lambda made: torch.optim.SGD(made.parameters(), lr=1.0),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    )
    replica.scaler = replica.step_state.scaler = torch.amp.GradScaler(
        "cpu"
    )  # --precision fp16 is refused here
    seen = []
    for step in run.steps(TensorDataset(torch.ones(4, 1)), batch_size=1, steps=4):
        factor = 1e36 if step.number == 1 else 0.1
        step.compute(lambda model, batch, factor=factor: Loss.mean(model(batch[0])[:, 0] * factor))
        seen.append((replica.optimizer.param_groups[0]["lr"], replica.model.weight.item()))
    return seen


def test_a_schedule_waits_where_the_loss_scaler_leaves_a_step_out() -> None:
    ((first, second, third, _),) = paceline.launch(scale_on_a_cpu, strategy="single", device="cpu")
    assert first[0] == 0.5
    assert second == first
    assert third[0] == 0.25
    assert third[1] < second[1] < 1.0

"""What is drawn into weights that are sharded: the numbers of one process, or a refusal."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.errors import InputError

OPTIONS = {"shards": 4, "threads": 1, "device": "cpu"}


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2), nn.LayerNorm(2))


def redraw(run: paceline.Run) -> tuple[str, float]:
    """Draw into every weight in each of the ways there are, take a step, and draw once more."""
    model, _ = run.prepare(make, lambda made: torch.optim.SGD(made.parameters(), lr=0.1))
    model[0].reset_parameters()
    model[2].reset_parameters()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight)).mul_(torch.rand_like(weight))
        nn.init.trunc_normal_(model[2].weight, generator=torch.Generator().manual_seed(2))
        model[0].bias.bernoulli_(0.3)
    drawn = torch.rand(()).item()
    for step in run.steps(torch.eye(6).repeat(2, 1), batch_size=12, steps=1):
        for batch in step:
            step.backward(model(batch).square().sum(1))
        step.apply()
    return run.weights_sha256(), drawn


def test_fsdp_draws_what_one_process_draws() -> None:
    (alone,) = paceline.launch(redraw, strategy="single", workers=1, **OPTIONS)
    assert paceline.launch(redraw, strategy="fsdp", workers=3, **OPTIONS) == (alone,) * 3


def test_fsdp_beside_tp_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"drawn for a weight of which each worker has a part.*'fsdp' or 'ddp'"
    ):
        paceline.launch(redraw, strategy="fsdp=2,tp=2", workers=4, **OPTIONS)


def make_and_look() -> nn.Module:
    """Make the model, and look at a value of it where nobody else does."""
    made = make()
    if dist.is_initialized() and dist.get_rank() == 1:
        float(next(made.parameters()).detach().sum())
    return made


def weights_made(run: paceline.Run) -> str:
    run.prepare(make_and_look, lambda made: torch.optim.SGD(made.parameters(), lr=0.1))
    return run.weights_sha256()


def test_one_worker_that_cannot_write_its_construction_down_has_all_make_the_model() -> None:
    options = {**OPTIONS, "elastic": False, "hang_timeout": 20}
    (alone,) = paceline.launch(weights_made, strategy="single", workers=1, **OPTIONS)
    assert paceline.launch(weights_made, strategy="fsdp", workers=2, **options) == (alone,) * 2

"""What an optimizer has kept of a parameter that it holds no more is left out of a saved state, and stays with the optimizer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.unit.training.own_runs import data, losses, opened


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def change(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Drop a bias behind one step, take it back behind a later one, and replace the head behind the last."""
    held = optimizer.param_groups[0]["params"]
    bias = model[0].bias  # type: ignore[index]
    if number == 1:
        held[:] = [one for one in held if one is not bias]
    elif number == 3:
        held.append(bias)
    elif number == 4:
        old = {id(one) for one in model[2].parameters()}  # type: ignore[index]
        torch.manual_seed(5)
        model[2] = nn.Linear(4, 1)  # type: ignore[operator]
        held[:] = [*(one for one in held if id(one) not in old), *model[2].parameters()]  # type: ignore[index]


def test_a_run_goes_on_as_a_plain_loop_does_and_is_saved(tmp_path: Path) -> None:
    plain, optimizer = make()
    features, targets = data().tensors
    for number in range(6):
        rows = slice(4 * number, 4 * number + 4)
        optimizer.zero_grad()
        (losses(plain, [features[rows], targets[rows]]).sum() / 4).backward()
        optimizer.step()
        change(plain, optimizer, number)
    with opened(shards=1, out=tmp_path, save_every=1) as run:
        model, made = run.prepare(*make())
        for step in run.steps(DataLoader(data(), batch_size=4), epochs=1):
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
            change(model, made, step.number)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)

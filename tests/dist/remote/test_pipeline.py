"""A pipeline over calls: the weights of one process that takes the micro-batches in turn, and what happens when one fails."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import paceline
from paceline import remote

MICRO_BATCHES = 20
STEPS = 6


@remote.function
def first_part() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh())


@remote.function
def middle_part() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU())


@remote.function
def last_part() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(32, 5)


@remote.function
def no_module() -> int:
    return 3


PARTS = (first_part, middle_part, last_part)


def loss_sum(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels, reduction="sum")


def examples() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(4)
    return torch.randn(23, 20, generator=source), torch.randint(5, (23,), generator=source)


def drive(_: remote.Session) -> tuple[dict[str, Tensor], list[float], list[str]]:
    pipeline = remote.Pipeline(
        {f"stage:{place}": part for place, part in enumerate(PARTS)}, micro_batches=MICRO_BATCHES
    )
    optimizer = pipeline.optimizer(torch.optim.Adam, lr=0.01)
    inputs, labels = examples()
    losses = [pipeline.step(inputs, labels, loss_sum, optimizer) for _ in range(STEPS)]
    before, problems = pipeline.state_dict(), []
    wrong = labels.clone()
    wrong[-1] = 99  # only the last micro-batch fails; the others have their gradients already
    for attempt in (
        lambda: pipeline.step(inputs, wrong, loss_sum, optimizer),
        lambda: pipeline.step(inputs[:3], labels[:3], loss_sum, optimizer),
        lambda: remote.Pipeline({"stage:0": no_module}, micro_batches=1),
        lambda: remote.Pipeline({}, micro_batches=1),
    ):
        try:
            attempt()
        except Exception as error:  # noqa: BLE001  (looked at by the test)
            problems.append(f"{type(error).__name__}: {error}")
    after = pipeline.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return after, losses, problems


def alone() -> tuple[dict[str, Tensor], list[float]]:
    """Train the same parts in one process, a micro-batch after the other."""
    stages = nn.ModuleList(part() for part in PARTS)
    optimizer = torch.optim.Adam(stages.parameters(), lr=0.01)
    inputs, labels = examples()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for some, their in zip(
            inputs.tensor_split(MICRO_BATCHES), labels.tensor_split(MICRO_BATCHES), strict=True
        ):
            value = some
            for stage in stages:
                value = stage(value)
            loss = loss_sum(value, their)
            (loss / len(inputs)).backward()
            total += loss.item()
        optimizer.step()
        losses.append(total / len(inputs))
    return {name: value.detach() for name, value in stages.state_dict().items()}, losses


def test_a_pipeline_over_calls_has_the_weights_of_one_process() -> None:
    results = paceline.launch_roles({"master": remote.Role(drive), "stages": 3}, threads=1)
    weights, losses, problems = results["master"][0]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected, expected_losses = alone()
    finally:
        torch.set_num_threads(threads)
    assert losses == expected_losses
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert len(problems) == 4
    assert "99" in problems[0]
    assert problems[1].startswith("InputError: 3 inputs and 3 targets do not make 20 micro-batches")
    assert "made a int, not a module" in problems[2]
    assert "0 stages" in problems[3]

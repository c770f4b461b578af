"""Plain PyTorch training of a prepared model outside of steps: under fsdp its gradients reach no row, so they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError

FEATURES = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
WANTED = FEATURES.sum(1, keepdim=True)
DATA = TensorDataset(FEATURES, WANTED)


def errors(model: Any) -> Tensor:
    made: Tensor = (model(FEATURES) - WANTED).square().mean()
    return made


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def train(model: Any) -> None:
    own = sgd(model)
    for _ in range(2):
        own.zero_grad()
        errors(model).backward()
        own.step()


def train_behind_a_pass(model: Any) -> None:
    """Take the parameters when the pass has left some of them gathered."""
    loss = errors(model)
    own = sgd(model)
    loss.backward()
    own.step()


def train_by_hand(model: Any) -> None:
    errors(model).backward()
    with torch.no_grad():
        for one in model.parameters():
            if one.grad is not None:
                one.sub_(0.05 * one.grad)


def clip(model: Any) -> None:
    errors(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def train_a_part(model: Any) -> None:
    own = torch.optim.Adam(model[2].parameters())
    errors(model).backward()
    own.step()


def add_a_penalty(model: Any) -> None:
    """Have another pass add to what cannot be there."""
    own = sgd(model)
    errors(model).backward()
    model[2].weight.square().sum().backward()
    own.step()


def train_those_named(model: Any) -> None:
    own = sgd(model)
    for _ in range(2):
        own.zero_grad()
        errors(model).backward(inputs=list(model.parameters()))
        own.step()


def train_by_gradients(model: Any, **options: Any) -> None:
    parameters = list(model.parameters())
    found = torch.autograd.grad(errors(model), parameters, **options)
    with torch.no_grad():
        for one, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                one.sub_(0.05 * gradient)


def probe(model: Any) -> None:
    for _ in range(2):
        errors(model).backward()


def decay(model: Any) -> None:
    """Take the gradients of what is computed of the weights themselves."""
    weights = [one for one in model.parameters() if one.dim() == 2]
    (first, *_), ones = weights, [torch.ones_like(one) for one in weights]
    found = torch.autograd.grad([one.square() for one in weights], weights, ones)
    first.grad = None
    first.square().backward(ones[0], inputs=[first])
    assert first.grad is not None
    with torch.no_grad():
        for weight, gradient in zip(weights, found, strict=True):
            weight.sub_(0.125 * gradient)
        first.sub_(0.125 * first.grad)
    first.grad = None


def attack(model: Any) -> list[float]:
    inputs = FEATURES.clone().requires_grad_()
    model(inputs).sum().backward()
    model.zero_grad()
    assert inputs.grad is not None
    (again,) = torch.autograd.grad(model(inputs).sum(), inputs)
    assert torch.equal(again, inputs.grad)
    return again.flatten().tolist()  # type: ignore[no-any-return]


def fit(features: int, errors: Callable[[nn.Module], Tensor]) -> float:
    """Train a layer that is no part of the model."""
    torch.manual_seed(1)
    small = nn.Linear(features, 1)
    own = sgd(small)
    for _ in range(3):
        own.zero_grad()
        errors(small).square().mean().backward()
        own.step()
    return small.weight.sum().item()


def train_a_head(model: Any) -> float:
    return fit(1, lambda head: head(model(FEATURES)))  # type: ignore[no-any-return]


def train_beside(model: Any) -> float:
    """Distil the model into one that is nobody else's."""
    return fit(4, lambda small: small(FEATURES) - model(FEATURES).detach())  # type: ignore[no-any-return]


REFUSED: dict[str, Callable[[Any], Any]] = {
    "train": train,
    "behind a pass": train_behind_a_pass,
    "by hand": train_by_hand,
    "clip": clip,
    "a part": train_a_part,
    "a penalty": add_a_penalty,
    "those named": train_those_named,
    "by gradients": train_by_gradients,
    "by some gradients": lambda model: train_by_gradients(model, allow_unused=True),
}
SAME: dict[str, Callable[[Any], Any]] = {
    "probe": probe,
    "decay": decay,
    "attack": attack,
    "head": train_a_head,
    "beside": train_beside,
}
PLACES = ("before", "after a step", "after an epoch", "after all")


def loop(run: paceline.Run, action: Callable[[Any], Any], place: str) -> tuple[Any, str]:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    model, _ = run.prepare(made, torch.optim.Adam(made.parameters(), lr=0.01))
    found = [action(model)] if place == "before" else []

    def end_epoch(_: Any) -> None:
        if place == "after an epoch":
            found.append(action(model))

    for step in run.steps(DATA, batch_size=8, epochs=1, after_epoch=end_epoch):
        for x, y in step:
            step.backward((model(x) - y).square().flatten())
        step.apply()
        if place == "after a step":
            found.append(action(model))
    if place == "after all":
        found.append(action(model))
    return found, run.weights_sha256()


def robust(run: paceline.Run, _: str) -> tuple[Any, str]:
    """Measure what an attack leaves, whose backward pass a loop writes as tutorials do."""
    found: list[Any] = []

    def measure(model: Any) -> None:
        def errors_under_attack(model: Any, batch: Any) -> dict[str, Any]:
            with torch.enable_grad():
                inputs = batch[0].clone().requires_grad_()
                (model(inputs) - batch[1]).square().sum().backward()
                model.zero_grad()
            assert inputs.grad is not None
            worse = inputs.detach() + 0.1 * inputs.grad.sign()
            return {"error": paceline.Mean((model(worse) - batch[1]).square().sum(), len(batch[0]))}

        found.append(run.evaluate(DATA, errors_under_attack))

    _, weights = loop(run, measure, "after a step")
    return found, weights


def attempts(run: paceline.Run, names: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    made: dict[tuple[str, str], Any] = {}
    for name, place in names:
        own = paceline.Run(run.world, run._engine.state.options)
        try:
            made[name, place] = (
                robust(own, place) if name == "robust" else loop(own, (REFUSED | SAME)[name], place)
            )
        except InputError as error:
            made[name, place] = str(error)
        run.world.comm.barrier()
        own._engine.state.replica.abandon()
    return made


def launch(strategy: str, workers: int, names: list[tuple[str, str]], **options: Any) -> list[Any]:
    return list(
        paceline.launch(
            attempts,
            names,
            strategy=strategy,
            workers=workers,
            shards=max(2, workers),
            threads=1,
            device="cpu",
            **options,
        )
    )


EVERYWHERE = [("train", place) for place in PLACES]
IN_EVERY_WAY = [(name, "after a step") for name in REFUSED]


@pytest.mark.parametrize(
    ("strategy", "workers", "names", "options"),
    [
        ("fsdp", 2, EVERYWHERE, {}),
        ("fsdp", 2, IN_EVERY_WAY, {}),
        ("fsdp", 2, IN_EVERY_WAY[:2], {"tuning": {"fsdp_dtype": "bf16"}}),
        ("ddp=2,fsdp=2", 4, IN_EVERY_WAY[:2], {}),
    ],
)
def test_plain_training_is_refused_where_nothing_would_be_trained(
    strategy: str, workers: int, names: list[tuple[str, str]], options: dict[str, Any]
) -> None:
    for found in launch(strategy, workers, names, **options):
        for name, said in found.items():
            # What a pass leaves in .grad behind an update is looked at before the pass is.
            outside = "outside of a step" in said and "step.backward(losses)" in said
            assert outside or "the loop used gradients behind step.apply()" in said, (name, said)
            assert "\n" not in said, name


def test_a_pass_whose_gradients_nobody_uses_changes_nothing() -> None:
    names = [*((name, "after a step") for name in SAME), ("probe", "before"), ("robust", "")]
    (alone,) = launch("single", 1, names)
    assert launch("fsdp", 2, names) == [alone, alone]


def test_a_pass_whose_gradients_nobody_uses_changes_nothing_in_fewer_bits() -> None:
    for found in launch(
        "fsdp",
        2,
        [("probe", "before"), ("probe", "after a step"), ("beside", "before")],
        tuning={"fsdp_dtype": "bf16"},
    ):
        assert len({weights for _, weights in found.values()}) == 1


def test_plain_training_trains_where_every_worker_has_the_weights() -> None:
    (alone,) = launch("single", 1, EVERYWHERE)
    assert launch("ddp", 2, EVERYWHERE) == [alone, alone]
    assert launch("ddp", 2, EVERYWHERE, shard_optimizer=True) == [alone, alone]

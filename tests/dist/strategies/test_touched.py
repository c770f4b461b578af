"""Gradients that hooks change, and weights that a forward pass writes to: as in one process, or refused in one line."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss, Task
from paceline.checkpoint import weights_sha256
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from tests.dist.strategies.scenarios import Outcome, same


class Words(nn.Module):
    def __init__(self, **table: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, **table)
        self.head = nn.Linear(6, 3)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.table(words).mean(1))
        return scores


class Base(Task):
    """26 sentences in batches of 8: the last batch has 2, so that some shards and workers have none."""

    batch_size = 8
    epochs = 2

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    def train_data(self) -> TensorDataset:
        words = torch.randint(9, (26, 5), generator=torch.Generator().manual_seed(2))
        return TensorDataset(words, words.sum(1) % 3)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


class Hooked(Base):
    """A mask, a clamp, and weight decay by hook: more than a factor, so that it must run on each pass and on no other."""

    def model(self) -> nn.Module:
        model = Words()
        model.table.weight.register_hook(lambda gradient: gradient * (torch.arange(9) > 0).unsqueeze(1))
        weight = model.head.weight
        weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05) + 0.01 * weight.detach())
        return model

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        made = super().loss(model, batch)
        table: Tensor = model.table.weight  # type: ignore[assignment,union-attr]
        return (
            made
            if self.kind == "plain"
            else Loss(made.total, made.weight, {"size": Loss(table.square().sum(), 1)})
        )


class Renormed(Base):
    def model(self) -> nn.Module:
        return Words(max_norm=0.5)


class Clipped(Base):
    """Writes past torch's count of writes, late: only a comparison of the workers' weights finds it."""

    calls = 0

    def model(self) -> nn.Module:
        return Words()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        made = super().loss(model, batch)
        self.calls += 1
        if self.calls > 8:  # in the last step: all values are compared in the first, second and fourth
            # One row in the middle: of each weight some values are compared in every step, the first and the last among them.
            model.head.weight.data[1].add_(1e-3 * batch[0].float().mean())  # type: ignore[operator,union-attr]
        return made


class Remembered(Clipped):
    """The same into a buffer."""

    def model(self) -> nn.Module:
        model = Words()
        model.register_buffer("seen", torch.zeros(()))
        return model

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        self.calls += 1
        if self.calls > 8:
            model.seen.data.add_(batch[0].float().mean())  # type: ignore[operator,union-attr]
        return Base.loss(self, model, batch)


class Spectral(Base):
    def model(self) -> nn.Module:
        model = Words()
        norm = nn.utils.spectral_norm if self.kind == "old" else nn.utils.parametrizations.spectral_norm
        norm(model.head)
        return model


class _Teacher(nn.Module):
    """A frozen copy of a student that the forward pass moves, in one of the ways that people write."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.student = Words()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def move(self) -> None:
        for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if self.kind == "in place":
                mine.mul_(0.9).add_(other, alpha=0.1)
            elif self.kind == "assigned":
                mine.data = 0.9 * mine.data + 0.1 * other.data
            elif self.kind == "copied":
                mine.data.copy_(other.data)
            else:
                mine.data.mul_(0.9).add_(other.data, alpha=0.1)

    def forward(self, words: Tensor) -> Tensor:
        if self.training and self.kind != "copied":
            self.move()
        scores: Tensor = self.student(words) + 0.1 * self.teacher(words)
        return scores


class Taught(Base):
    def model(self) -> nn.Module:
        return _Teacher(self.kind)


class Copied(Base):
    """A frozen copy that the loss renews past torch's count, in the third step alone: not all values are compared there."""

    def model(self) -> nn.Module:
        return _Teacher("copied")

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        if self.steps_done == 2:
            model.move()  # type: ignore[operator]
        return super().loss(model, batch)


class Early(Base):
    """An optimizer that steps in the backward pass."""

    def model(self) -> nn.Module:
        model = Words()
        model.head.bias.register_post_accumulate_grad_hook(lambda _: None)
        return model


JOBS = {
    "hooked": ("Hooked", {}),
    "hooked alone": ("Hooked", {"kind": "plain"}),
    "spectral": ("Spectral", {"kind": "new"}),
    "old spectral": ("Spectral", {"kind": "old"}),
    "renormed": ("Renormed", {}),
    "taught in place": ("Taught", {"kind": "in place"}),
    "taught by assignment": ("Taught", {"kind": "assigned"}),
    "taught through data": ("Taught", {"kind": "into data"}),
    "copied": ("Copied", {}),
    "early": ("Early", {}),
}
COPIED = re.compile("step 2: .* wrote to the weights of teacher.table.weight")


TAUGHT = [name for name in JOBS if name.startswith("taught")]


def work(run: paceline.Run, jobs: dict[str, tuple[str, dict[str, str]]]) -> dict[str, Outcome]:
    made: dict[str, Outcome] = {}
    for name, (task, settings) in jobs.items():
        own = paceline.Run(run.world, run._engine.state.options)
        spec = TrainSpec(task=f"{__name__}:{task}", name=task, steps=5, settings=settings)
        try:
            trainer.main(own, spec)
        except paceline.InputError as error:
            made[name] = str(error)
        else:
            made[name] = {
                key: value.clone() for key, value in own._engine.state.replica.state()["model"].items()
            }
    return made


def train(jobs: dict[str, Any], strategy: str, workers: int) -> list[dict[str, Outcome]]:
    return list(paceline.launch(work, jobs, strategy=strategy, workers=workers, shards=4, threads=1))


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    return train(JOBS, "single", 1)[0]


def test_one_process_takes_them_all_but_one(alone: dict[str, Outcome]) -> None:
    assert [name for name, outcome in alone.items() if isinstance(outcome, str)] == ["early"]
    assert "head.bias has a hook of register_post_accumulate_grad_hook" in str(alone["early"])
    assert not same(alone["hooked"], alone["hooked alone"])


def test_dp_takes_all_that_one_process_takes(alone: dict[str, Outcome]) -> None:
    (found,) = train(JOBS, "dp", 2)
    assert [name for name, outcome in found.items() if not same(outcome, alone[name])] == []


def test_hooks_run_and_writes_are_refused(alone: dict[str, Outcome]) -> None:
    for found in train(JOBS, "ddp", 2):
        assert "wrote to the weights of table.weight" in str(found.pop("renormed"))
        for kind in TAUGHT:
            assert re.match("step 0: .* wrote to the weights of teacher.table.weight", str(found.pop(kind)))
        assert COPIED.match(str(found.pop("copied")))
        assert [name for name, outcome in found.items() if not same(outcome, alone[name])] == []


def test_workers_that_part_are_found_before_anything_is_saved_or_reported() -> None:
    for found in train({"clipped": ("Clipped", {})}, "ddp", 2):
        assert "head.weight differs between rank 0 and rank 1" in str(found["clipped"])


@pytest.mark.parametrize("strategy", ["fsdp", "local-sgd"])
def test_weights_that_a_pass_moves_are_refused_in_the_first_step(strategy: str) -> None:
    jobs = {name: JOBS[name] for name in TAUGHT} | {"late buffer": ("Remembered", {})}
    for found in train(jobs, strategy, 2):
        late = found.pop("late buffer")
        if strategy == "fsdp":
            assert "seen differs between rank 0 and rank 1" in str(late)
        for kind, words in found.items():
            assert re.match("step 0: .* wrote to the weights of teacher", str(words)), (kind, words)


def refused(run: paceline.Run) -> None:
    spec = TrainSpec(task=f"{__name__}:Copied", name="Copied", steps=5)
    trainer.main(run, spec)  # nothing is caught: servers wait for trainers that do not end


@pytest.mark.parametrize("strategy", ["fsdp", "ps", "tp"])
def test_a_copy_made_now_and_then_is_refused_in_the_step_that_makes_it(strategy: str) -> None:
    with pytest.raises(paceline.InputError, match=COPIED):
        paceline.launch(refused, strategy=strategy, workers=2, shards=4, threads=1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, values: Tensor) -> Tensor:
        made: Tensor = self.layers(values)
        return made


def look_on_the_way(run: paceline.Run, ranks: int) -> str:
    """Run a forward pass between two steps, on some workers, in training mode."""
    torch.manual_seed(1)
    model, _ = run.prepare(Normed(), lambda made: torch.optim.SGD(made.parameters(), lr=0.1))
    values = torch.randn(32, 4, generator=torch.Generator().manual_seed(2))
    for step in run.steps(TensorDataset(values), batch_size=8, epochs=1):
        step.compute(lambda model, batch: paceline.Loss.mean(model(batch[0]).square()))
        if step.number == 1 and run.world.rank < ranks:
            model(values[:8])
    return weights_sha256(run._engine.state.replica.state()["model"])


def test_statistics_that_move_on_one_worker_between_two_steps_are_refused() -> None:
    (alone,) = paceline.launch(look_on_the_way, 2, strategy="single", shards=4, threads=1)
    assert set(paceline.launch(look_on_the_way, 2, strategy="ddp", workers=2, shards=4, threads=1)) == {alone}
    with pytest.raises(paceline.InputError, match="not the same on rank 0 and rank 1 when the step began"):
        paceline.launch(look_on_the_way, 1, strategy="ddp", workers=2, shards=4, threads=1)

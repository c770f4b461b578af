"""Several models and optimizers in one run, in this process: what a turn trains, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
import paceline.strategies
from paceline.errors import InputError
from paceline.training import RunOptions
from paceline.training.run import engine_of
from paceline.world import alone

TURNS = ("critic", "actor")


def inputs(count: int = 12) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, generator=torch.Generator().manual_seed(5)))


def pair() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    return {"actor": nn.Linear(3, 2), "critic": nn.Linear(2, 1)}


def optimizers(models: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    return {
        "actor": torch.optim.AdamW(models["actor"].parameters(), lr=0.1),
        "critic": torch.optim.SGD(models["critic"].parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
    }


@contextmanager
def opened(**options: Any) -> Iterator[paceline.Run]:
    run = paceline.Run(alone(), RunOptions(**{"shards": 1, **options}))
    try:
        yield run
    finally:
        engine_of(run).close()


def both() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    models = pair()
    return models, optimizers(models)


def losses(step: paceline.Step, models: Any, batch: Tensor) -> Tensor:
    scored: Tensor = models["critic"](models["actor"](batch)).squeeze(1)
    return (scored - 1) ** 2 if step.turn == "critic" else -scored


def weights(models: Any) -> dict[str, Tensor]:
    return {f"{name}.{key}": one for name, model in models.items() for key, one in model.state_dict().items()}


def test_each_turn_is_a_step_of_its_own_optimizer_and_nothing_else_moves() -> None:
    mine = pair()
    theirs = optimizers(mine)
    rates = {"critic": torch.optim.lr_scheduler.StepLR(theirs["critic"], 2)}
    with opened() as run:
        models, made = run.prepare(mine, theirs, scheduler=rates)
        assert models["actor"] is mine["actor"]
        assert made["critic"] is theirs["critic"]
        seen: list[tuple[Any, Tensor]] = []
        for step in run.steps(inputs(), batch_size=5, epochs=2, turns=TURNS):
            for (batch,) in step:
                seen.append((step.turn, batch.clone()))
                step.backward(losses(step, models, batch))
                batch.zero_()  # which the next turn does not see
            made[step.turn or ""].step() if step.epoch else step.apply()
            assert all(
                (one.grad is None) == (step.turn != name)
                for name in TURNS
                for one in models[name].parameters()
            )
    assert [turn for turn, _ in seen] == [*TURNS] * 6
    assert all(
        torch.equal(first, second) for (_, first), (_, second) in zip(seen[::2], seen[1::2], strict=True)
    )
    # The same in plain PyTorch.
    plain = pair()
    each = optimizers(plain)
    rate = torch.optim.lr_scheduler.StepLR(each["critic"], 2)
    for turn, batch in seen:
        scored = plain["critic"](plain["actor"](batch)).squeeze(1)
        for one in each.values():
            one.zero_grad()
        ((scored - 1) ** 2 if turn == "critic" else -scored).mean().backward()
        each[turn].step()
        if turn == "critic":
            rate.step()
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(models)[name], value, rtol=1e-5, atol=1e-6)
    assert made["critic"].param_groups[0]["lr"] == each["critic"].param_groups[0]["lr"]
    counts = {int(entry["step"]) for entry in made["actor"].state.values()}
    assert counts == {6}


def test_each_model_computes_in_the_precision_of_the_run() -> None:
    with opened(precision="bf16") as run:
        models, _ = run.prepare(*both())
        one, exact = torch.randn(64, 3), pair()["actor"]
        made = models["actor"](one)
        assert made.dtype == torch.float32
        assert not torch.equal(made, exact(one))
        torch.testing.assert_close(made, exact(one), rtol=0.05, atol=0.05)


def test_a_prepared_loader_is_gone_through_in_turns() -> None:
    with opened() as run:
        loader = torch.utils.data.DataLoader(inputs(), batch_size=5, drop_last=True)
        models, made, data = run.prepare(*both(), loader)
        turns = []
        for step in run.steps(data, epochs=2, turns=TURNS):
            for (batch,) in step:
                step.backward(losses(step, models, batch))
            made[step.turn].step()
            assert len(data) == 2
            turns.append(step.turn)
            if step.number == 1:  # its own batches, once each, in the middle of an epoch that goes on
                rows = run.predict(inputs(), lambda models, batch: models["actor"](batch[0]))
                assert rows.shape == (12, 2)
        assert turns == [*TURNS] * 4
        for step in data:
            assert step.turn is None
            for (batch,) in step:
                step.backward(losses(step, models, batch))
            step.apply()
        assert run._engine.state.position.number == 10


def test_parts_are_not_given_in_turns() -> None:
    parts = paceline.data.Parts([[1.0, 2.0], [3.0, 4.0]], iter, lengths=len)
    with opened() as run:
        run.prepare(*both())
        with pytest.raises(InputError, match="Say fresh_batches=True"):
            next(iter(run.steps(parts, batch_size=2, steps=2, turns=TURNS)))


def test_without_turns_all_step_at_once() -> None:
    with opened() as run:
        models, _ = run.prepare(*both())
        before = {name: one.clone() for name, one in weights(models).items()}
        for step in run.steps(inputs(), batch_size=12, steps=1):
            for (batch,) in step:
                step.backward(losses(step, models, batch))
            step.apply()
        assert not any(torch.equal(one, before[name]) for name, one in weights(models).items())


def test_fresh_batches_go_round_over_the_end_of_an_epoch() -> None:
    """Two optimizers of one model, as an actor and a critic over one trunk have."""
    torch.manual_seed(1)
    model: Any = nn.ModuleDict(
        {"trunk": nn.Linear(3, 4), "value": nn.Linear(4, 1), "policy": nn.Linear(4, 2)}
    )
    with opened() as run:
        model, made = run.prepare(
            model,
            {
                "critic": torch.optim.Adam(
                    [*model["trunk"].parameters(), *model["value"].parameters()], lr=0.1
                ),
                "actor": torch.optim.Adam(model["policy"].parameters(), lr=0.1),
            },
        )
        seen = []
        turns = ("critic", "critic", "actor")
        for step in run.steps(inputs(), batch_size=3, epochs=2, turns=turns, fresh_batches=True):
            for (batch,) in step:
                hidden = torch.tanh(model["trunk"](batch))
                if step.turn == "critic":
                    step.backward((model["value"](hidden).squeeze(1) - 1) ** 2)
                else:
                    step.backward(-model["policy"](hidden.detach()).log_softmax(1)[:, 0])
                seen.append((step.epoch, step.turn, batch.sum().item()))
            step.apply()
    assert [turn for _, turn, _ in seen] == [*turns, *turns, "critic", "critic"]
    assert [epoch for epoch, *_ in seen] == [0] * 4 + [1] * 4
    assert len({value for _, _, value in seen[:4]}) == 4
    assert {int(entry["step"]) for entry in made["actor"].state.values()} == {2}


def take(run: paceline.Run, how: str) -> None:
    """Do one thing that is refused."""
    models, made = run.prepare(*both())
    turns: Any = {"misspelled": ("critic", "actr"), "one name": "critic", "alone": ()}.get(how, TURNS)
    for step in run.steps(inputs(), batch_size=6, steps=4, turns=turns):
        for (batch,) in step:
            if how == "out of reach" and step.turn == "actor":
                step.backward(models["critic"](models["actor"](batch).detach()).squeeze(1))
            elif how == "called together":
                models(batch)
            else:
                step.backward(losses(step, models, batch))
            if how == "cleared":
                made["actor"].zero_grad()
        if how in {"stepped", "alone"} or (how == "out of turn" and step.turn == "actor"):
            made["critic"].step()
        step.apply()
        if how == "grown":
            made["actor"].add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("misspelled", "unknown turn 'actr'. Did you mean 'actor'"),
        ("one name", "is one name"),
        ("out of reach", "turn 'actor' depends on no parameter of its optimizer"),
        ("called together", "Call one of them: models"),
        ("cleared", "optimizer.zero_grad"),
        ("stepped", "was called before"),
        ("out of turn", "step\\(\\) of the optimizer 'critic' in a step for the turn of 'actor'"),
        ("alone", "step\\(\\) of the optimizer 'critic' in a step for all optimizers"),
        ("grown", "add_param_group was called in a run of several optimizers"),
    ],
)
def test_what_a_loop_of_several_may_not_do(how: str, line: str) -> None:
    with opened() as run, pytest.raises(InputError, match=line):
        take(run, how)


def prepared(what: str) -> tuple[Any, ...]:
    models = pair()
    made: dict[str, Any] = dict(optimizers(models))
    schedule = torch.optim.lr_scheduler.StepLR(made["actor"], 1)
    shared = {**made, "again": torch.optim.SGD(models["actor"].parameters(), lr=0.1)}
    return {
        "one optimizer": (models, made["actor"]),
        "no name": ({"keys": models["actor"]}, made),
        "shared": (models, shared),
        "no optimizer": (models, {**made, "other": None}),
        "mixed": ({"actor": models["actor"], "critic": lambda: models["critic"]}, made),
        "stranger": (models, made, {"actr": schedule}),
        "another's": (models, made, {"critic": schedule}),
        "by epochs": (models, made, {"actor": paceline.PerEpoch(schedule)}),
        "by place": (models, made, None, {"actor": schedule}),
        "one by place": (models, made, None, schedule),
        "with a closure": (models, {**made, "critic": torch.optim.LBFGS(models["critic"].parameters())}),
        "schedules of one": (models["actor"], made["actor"], {"actor": schedule}),
        "of no model": (
            {"actor": lambda: nn.Linear(3, 2)},
            {"critic": lambda one: torch.optim.SGD(one.parameters())},
        ),
    }[what]


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("one optimizer", "several models and one optimizer"),
        ("no name", "'keys' cannot be the name"),
        ("shared", "the optimizers actor and again hold the same parameter"),
        ("no optimizer", "the optimizer 'other' is a NoneType"),
        ("mixed", "Give all models, or"),
        ("stranger", "unknown optimizer of the scheduler 'actr'. Did you mean 'actor'"),
        ("another's", "belongs to another optimizer"),
        ("by epochs", "is a paceline.PerEpoch, and those of several optimizers count their updates"),
        ("by place", "steps their schedules itself"),
        ("one by place", "steps their schedules itself"),
        ("with a closure", "the optimizer 'critic', a LBFGS, computes the loss several times"),
        ("schedules of one", "a dict of schedulers and one optimizer"),
        ("of no model", "unknown model for the optimizer 'critic'"),
    ],
)
def test_what_cannot_be_prepared(what: str, line: str) -> None:
    models, made, *schedules = prepared(what)
    with opened() as run, pytest.raises(InputError, match=line):
        run.prepare(models, made, *schedules[1:], scheduler=schedules[0] if schedules else None)


def test_turns_need_several_optimizers_and_a_strategy_that_takes_them() -> None:
    with opened() as run:
        models = pair()
        run.prepare(models["actor"], torch.optim.SGD(models["actor"].parameters(), lr=0.1))
        with pytest.raises(InputError, match=r"this run has one\. Prepare them by name"):
            next(iter(run.steps(inputs(), steps=1, turns=TURNS)))
    with opened(compile=True) as run, pytest.raises(InputError, match="--compile trains one model"):
        run.prepare(*both())
    with opened(strategy="tp") as run, pytest.raises(InputError, match="--strategy tp trains one model"):
        run.prepare(*both())


def test_no_room_has_the_name_of_a_function_beside_it() -> None:
    """A package that is imported takes the place of what its parent has under its name."""
    assert paceline.strategies.several("ddp,fsdp=2") == ("ddp", "fsdp=2")

"""fsdp: no worker holds all of a model, and the answer is that of one process, to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.errors import InputError
from paceline.strategies.base import ShardWork, StepWork
from paceline.strategies.fsdp.strategy import Fsdp
from paceline.strategies.tuning import Tuning
from paceline.training.strategy_inputs import carried_inputs, new_parts
from tests.dist.strategies import sharded_runs
from tests.dist.strategies.sharded_runs import (
    RATE,
    Crossed,
    Model,
    Outcome,
    Partly,
    Shared,
    Training,
    train_all,
)
from tests.dist.strategies.test_special_models import train as train_special

SHORT = Training(samples=10)
SOCKETS = Training(shards=5, micro_batch=1, samples=10, options={"transport": "gloo"})
TWO = {
    "3 shards": Training(shards=3, batch_size=7),
    "8 shards, micro-batches": Training(shards=8, micro_batch=1, batch_size=17, samples=40),
    "a block used twice": Training(model=Shared, micro_batch=1),
    # The last batch is one sample, so one worker has none; weights stay gathered between forward and backward.
    "own loop": replace(SHORT, own_loop=True, options={"tuning": Tuning(reshard=False)}),
    "trained in part": replace(SHORT, model=Partly),
    "one tensor in several blocks": Training(model=Crossed),
    "short": SHORT,
    "over sockets": SOCKETS,
}
THREE = {"3 shards": TWO["3 shards"], "5 shards": Training(shards=5), "short": SHORT}
FOUR = {"5 shards, micro-batches": Training(shards=5, micro_batch=1), "short": SHORT, "over sockets": SOCKETS}
LOWER = {
    "numeric": Training(options={"exact": "numeric"}, micro_batch=1, max_grad_norm=None),
    "bf16": Training(options={"exact": "numeric", "tuning": Tuning(fsdp_dtype="bf16")}, max_grad_norm=None),
}


def launch(trainings: dict[str, Training], strategy: str, workers: int) -> list[dict[str, Outcome]]:
    made: list[dict[str, Outcome]] = paceline.launch(
        train_all, trainings, strategy=strategy, workers=workers, shards=4, threads=1, device="cpu"
    )
    return made


@pytest.fixture(scope="module")
def one() -> dict[str, Outcome]:
    return launch(
        {**TWO, **THREE, **FOUR, **{name: replace(job, options={}) for name, job in LOWER.items()}},
        "single",
        1,
    )[0]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    else:
        yield path, value


def assert_same(left: Any, right: Any) -> None:
    mine, others = dict(leaves(left)), dict(leaves(right))
    assert mine.keys() == others.keys()
    for path, value in mine.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, others[path]), path
        else:
            assert value == others[path], path


@pytest.fixture(scope="module")
def four() -> list[dict[str, Outcome]]:
    return launch({**FOUR, **LOWER}, "ddp=2,fsdp=2", 4)


def assert_bitwise(
    one: dict[str, Outcome], ranks: list[dict[str, Outcome]], names: Iterable[str], rows: int
) -> None:
    for name in names:
        for many in ranks:
            assert_same(one[name].state, many[name].state)
            assert many[name].losses == one[name].losses, name
            assert many[name].norms == one[name].norms, name
            assert many[name].metrics == one[name].metrics, name
            assert many[name].notes == [], "the whole model was never made"
            assert many[name].exactness == "bitwise"
    # The rows of a small tensor do not divide evenly, and buffers are on every worker.
    assert max(many["short"].held for many in ranks) < 1.3 * one["short"].held / rows


@pytest.mark.parametrize(("trainings", "workers"), [(TWO, 2), (THREE, 3)], ids=["2", "3"])
def test_the_same_bits(one: dict[str, Outcome], trainings: dict[str, Training], workers: int) -> None:
    assert_bitwise(one, launch(trainings, "fsdp", workers), trainings, workers)


def test_the_same_bits_in_two_copies(one: dict[str, Outcome], four: list[dict[str, Outcome]]) -> None:
    assert_bitwise(one, four, FOUR, 2)


# Sums of at most 2 x 9 x 6 gradients below 1 in another order, eps 2^-23 each, through 3 steps that move a weight by no
# more than its gradient: twice that, as in the contract. bf16 keeps 8 bits of each of 30 weights that make up an output.
@pytest.mark.parametrize(
    ("name", "bound"), [("numeric", 2 * 3 * 108 * 2**-23), ("bf16", 3 * 30 * 2**-8 * RATE)]
)
def test_below_bitwise(
    one: dict[str, Outcome], four: list[dict[str, Outcome]], name: str, bound: float
) -> None:
    for many in four:
        assert many[name].exactness == "numeric"
        assert many[name].losses == pytest.approx(one[name].losses, rel=0.02)
        for key, value in one[name].state["model"].items():
            assert (many[name].state["model"][key].double() - value.double()).abs().max() <= bound, key


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    alone = train_special("Branching", "single", 1, samples=9)
    assert (
        train_special("Branching", "fsdp", 2, samples=9).result["weights_sha256"]
        == alone.result["weights_sha256"]
    )


def regroup(run: paceline.Run) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Train a model of the user's own, leave the group in the middle, and go on in another one."""
    torch.manual_seed(3)
    model = Partly()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain = {name: value.detach().clone() for name, value in model.state_dict().items()}
    parts = new_parts(
        run._engine.state.options,
        run._engine.state.exactness,
        run.world.device,
        model,
        optimizer,
        None,
        None,
        None,
    )
    first = Fsdp().prepare(parts, run.world)
    assert all(torch.equal(value, plain[name]) for name, value in first.state()["model"].items())
    loader = run.loader(sharded_runs.data(21), batch_size=9)
    works = [
        StepWork(
            data.step,
            data.size,
            [ShardWork(shard.index, shard.index, shard.samples, shard.batches) for shard in data.shards],
        )
        for data in loader.epoch(0)
    ]
    first.step(works[0], sharded_runs.loss, 0.05)
    before = first.state()
    first.abandon()
    held = first.local_state()
    second = Fsdp().prepare(carried_inputs(parts, first), run.world)
    second.load_local_state(
        {key: chunk.meta for key, chunk in held.chunks.items()},
        lambda key, bounds: bounds.of(sharded_runs.whole(before, key)),
        held.extra_state,
    )
    again = second.state()
    second.step(works[1], sharded_runs.loss, 0.05)
    return before, again, second.model is model


def test_a_model_of_the_users_own_goes_on_in_another_group() -> None:
    for before, again, same in paceline.launch(regroup, strategy="fsdp", workers=2, threads=1, device="cpu"):
        assert same
        assert_same(before, again)


class Tied(Model):
    """The first block's layer is the second one's too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].feed_in.weight = self.blocks[0].feed_in.weight


class Scalar(Model):
    """With a parameter that has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class Unknown(torch.optim.AdamW):
    """Still known: it is an AdamW."""


def prepare(run: paceline.Run, model: type[nn.Module], optimizer: type[torch.optim.Optimizer]) -> None:
    run._engine.preparation.prepare_replica(model, lambda made: optimizer(made.parameters(), lr=0.1))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("model", "optimizer", "tuning", "message"),
    [
        (Tied, Unknown, {}, r"blocks\.0\.feed_in\.weight and blocks\.1\.feed_in\.weight are one parameter"),
        (Scalar, Unknown, {}, r"scale is a single number without a dimension"),
        (Model, torch.optim.Adafactor, {}, r"Adafactor may look across rows"),
        (Model, Unknown, {"offload": True}, r"offload=True needs an accelerator"),
    ],
)
def test_what_is_refused(
    model: type[nn.Module], optimizer: type[torch.optim.Optimizer], tuning: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        paceline.launch(
            prepare, model, optimizer, strategy="fsdp", workers=2, device="cpu", tuning=Tuning(**tuning)
        )

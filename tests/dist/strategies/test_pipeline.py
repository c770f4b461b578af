"""A pipeline is one process, to the bit: in every schedule, for models with a forward pass of their own, on uneven data."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError
from paceline.strategies.base import StrategyInputs
from paceline.strategies.pipeline.call import StandIn
from paceline.strategies.pipeline.strategy import Pipeline
from paceline.strategies.precision import Precision
from paceline.strategies.tuning import Tuning
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from paceline.world import alone
from paceline.world.mesh import Mesh

STEPS = 3
SHARDS = 4


def spec(
    task: str, *, steps: int = STEPS, micro_batch: int | None = None, batch_size: int = 7, **settings: str
) -> TrainSpec:
    """Say what to train: 7 samples for 4 shards, one of which gets 1, and a last batch of 5."""
    return TrainSpec(
        task=f"tests.dist.strategies.pipelines:{task}",
        name=task,
        steps=steps,
        batch_size=batch_size,
        settings={"samples": "33", **settings},
        overrides={} if micro_batch is None else {"micro_batch": micro_batch},
    )


ROWS = {"rows": spec("Deep", batch_size=16, samples="42")}  # batch statistics need two samples in every shard
# Auxiliary terms, clipping, dropout, batches of every length, and shards of several micro-batches.
BOTH = {**ROWS, "sentences": spec("Sentences", micro_batch=1)}
FOUR = {
    "rows": ROWS["rows"],
    "in place": spec("Scaled", batch_size=16),
}  # four layers, for four workers or two of two stages
MORE = {
    **BOTH,
    **FOUR,
    "mixed": spec("Mixed", micro_batch=1, batch_size=14),
    "mixed forward": spec("MixedForward", micro_batch=1, batch_size=14, dropout="0"),
    "noise": spec("Noisy", micro_batch=1),
    "short": spec("Noisy", samples="9"),  # the last batch is 2 samples for 4 shards
    "named": spec("Named", batch_size=16, samples="42", cuts="2.1"),
    "halves": spec("Halved"),
    "doubles": spec("Doubled", max_grad_norm="0.05"),
}
PLAIN = {"plain": spec("Plainer")}


Results = dict[str, dict[str, Any]]


def work(run: paceline.Run, specs: dict[str, TrainSpec]) -> Results:
    """Train one after the other; gives of each the result, the whole state, and what this worker holds of it."""
    made = {}
    for name, one in specs.items():
        own = paceline.Run(run.world, run._engine.state.options)
        result = trainer.main(own, one)
        held = {
            key: chunk.values.numel() for key, chunk in own._engine.state.replica.local_state().chunks.items()
        }
        made[name] = {"result": result, "state": own._engine.state.replica.state(), "held": held}
    return made


def train(specs: dict[str, TrainSpec], strategy: str, workers: int, **options: Any) -> list[Results]:
    """Train with real workers; gives what came of it on each."""
    return paceline.launch(
        work, specs, strategy=strategy, workers=workers, shards=SHARDS, threads=1, **options
    )


def assert_same(left: Any, right: Any, path: str = "") -> None:
    """Compare states leaf by leaf, in the same order, to the bit."""
    if isinstance(left, dict):
        assert list(left) == list(right), path
        for key in left:
            assert_same(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, list):
        assert len(left) == len(right), path
        for place, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{path}/{place}")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), path
    else:
        assert left == right, path


@pytest.fixture(scope="module")
def one() -> Results:
    (results,) = train({**MORE, **PLAIN}, "single", 1)
    return results


@pytest.mark.parametrize(
    ("schedule", "strategy", "workers", "specs"),
    [
        ("1f1b", "pp", 2, MORE),
        ("gpipe", "pp", 3, BOTH),
        ("interleaved", "pp", 4, ROWS),
        ("interleaved", "pp", 2, FOUR),
        ("zero-bubble", "pp", 2, BOTH),
        ("interleaved", "fsdp=2,pp=2", 4, BOTH),
    ],
)
def test_every_schedule_is_one_process_to_the_bit(
    one: Results, schedule: str, strategy: str, workers: int, specs: dict[str, TrainSpec]
) -> None:
    for many in train(specs, strategy, workers, tuning=Tuning(schedule=schedule)):
        for name in specs:
            assert many[name]["result"]["exactness"] == "bitwise"
            assert many[name]["result"]["loss"] == one[name]["result"]["loss"]
            assert many[name]["result"]["metrics"] == one[name]["result"]["metrics"]
            assert_same(one[name]["state"], many[name]["state"], name)


def test_each_worker_keeps_its_part_only_and_of_its_blocks_only_the_products(one: Results) -> None:
    whole = one["plain"]["held"]
    recomputing = train(PLAIN, "pp", 2, tuning=Tuning(activation_checkpointing="selective"))
    for many in recomputing:
        assert_same(one["plain"]["state"], many["plain"]["state"])
    first, last = (results["plain"]["held"] for results in recomputing)
    assert not first.keys() & last.keys()
    assert {**first, **last} == whole
    assert max(sum(first.values()), sum(last.values())) < 0.6 * sum(whole.values())
    cut = [results["plain"]["held"] for results in train(PLAIN, "fsdp=2,pp=2", 4)]
    # The number of steps of each of an optimizer's slots is on both.
    steps = sum(count for key, count in whole.items() if key.endswith("/step"))
    assert sum(sum(held.values()) for held in cut) == sum(whole.values()) + steps
    assert max(sum(held.values()) for held in cut) < 0.35 * sum(whole.values())


# A lost worker.


def lose(run: paceline.Run, killed: str | None) -> dict[str, torch.Tensor]:
    """Train, and kill the worker of rank 1 once in the middle, where a file is named that says so."""
    made = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(72, 6, generator=made), torch.randint(3, (72,), generator=made))

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def loss(model: nn.Module, batch: Any) -> paceline.Loss:
        if (
            killed is not None
            and run.world.rank == 1
            and not Path(killed).exists()
            and run._engine.state.position.number == 3
        ):
            Path(killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return paceline.Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))

    run._engine.preparation.prepare_replica(model, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    for step in run.steps(data, batch_size=24, steps=6):
        step.compute(loss)
    assert (killed is not None) == bool(run._engine.state.recoveries)
    state: dict[str, torch.Tensor] = run._engine.state.replica.state()["model"]
    return state


def test_a_lost_worker_changes_nothing(tmp_path: Path) -> None:
    (wanted,) = paceline.launch(lose, None, strategy="single", shards=SHARDS, threads=1)
    killed = tmp_path / "killed"
    states = paceline.launch(lose, str(killed), strategy="ddp=2,pp=2", workers=4, shards=SHARDS, threads=1)
    assert killed.exists()
    for state in states:
        assert_same(dict(wanted), dict(state))


# Bad input.


@pytest.mark.parametrize(
    ("task", "schedule", "words"),
    [
        ("Peeking", "1f1b", r"the loss sees only the model's output, not model\.\[0\]"),
        ("MixedForward", "1f1b", "draws from torch before a cut of the pipeline, and so do modules"),
        ("Tokens", "interleaved", "into 4 stages, but it has 3 layers"),
    ],
)
def test_what_a_pipeline_cannot_do(task: str, schedule: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        train({"bad": spec(task)}, "pp", 2, tuning=Tuning(schedule=schedule))


def test_a_model_that_is_called_twice() -> None:
    model = StandIn(lambda args, _: args[0], training=True)
    assert model(1) == 1
    with pytest.raises(InputError, match="calls the model twice"):
        model(1)


def test_a_model_that_is_written_to() -> None:
    model = StandIn(lambda args, _: args[0], training=True)
    for name in ("scale", "training"):
        with pytest.raises(InputError, match=rf"the loss changes model\.{name}, but under pp"):
            setattr(model, name, 2.0)
        with pytest.raises(InputError, match=rf"the loss changes model\.{name}, but under pp"):
            delattr(model, name)
    with pytest.raises(InputError, match=r"the loss changes model\.\[head\]"):
        model["head"] = nn.Identity()  # type: ignore[index]
    assert model.training


def own_loop(run: paceline.Run) -> None:
    """Train by hand."""
    model, _ = run.prepare(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), lambda made: torch.optim.SGD(made.parameters())
    )
    for step in run.steps(TensorDataset(torch.randn(8, 3)), batch_size=4, steps=1):
        for (x,) in step:
            step.backward(model(x).sum(), len(x))


def test_a_loop_of_the_users_own() -> None:
    with pytest.raises(InputError, match=r"pp needs step\.compute\(loss\)"):
        paceline.launch(own_loop, strategy="pp", workers=2, threads=1)


def parts(
    shards: int = 4, *, whole: bool = False, sync_batchnorm: bool = False, **tuning: Any
) -> StrategyInputs:
    return StrategyInputs(
        make_model=lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
        make_optimizer=lambda made: torch.optim.SGD(made.parameters()),
        make_scheduler=lambda _: None,
        precision=Precision("fp32", torch.device("cpu")),
        shards=shards,
        compile=whole,
        sync_batchnorm=sync_batchnorm,
        tuning=Tuning(**tuning),
    )


@pytest.mark.parametrize(
    ("given", "sides", "words"),
    [
        (parts(2), {"pp": 3}, "1f1b needs at least 3 micro-batches .* has 2 of the 2 shards. Use --shards 3"),
        (
            parts(4, schedule="interleaved"),
            {"pp": 3, "ddp": 2},
            "interleaved needs .* has 2 of the 4 shards. Use --shards 6",
        ),
        (parts(stages_per_worker=2), {"pp": 2}, "1f1b holds one stage a worker, not 2"),
        (
            parts(schedule="zero-bubble", activation_checkpointing="selective"),
            {"pp": 2},
            "Use --activation-checkpointing blocks",
        ),
        (parts(whole=True), {"pp": 2}, "Leave --compile out"),
        (parts(sync_batchnorm=True), {"pp": 2}, "--sync-batchnorm needs all shards at once"),
    ],
)
def test_what_is_refused_beforehand(given: StrategyInputs, sides: dict[str, int], words: str) -> None:
    mesh = Mesh.of(sides)
    with pytest.raises(InputError, match=words):
        Pipeline().prepare(given, replace(alone(), size=mesh.workers, mesh=mesh))

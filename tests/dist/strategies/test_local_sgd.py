"""local-sgd: workers step alone and average; with plain SGD and one local step that is ddp."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import weights_sha256
from paceline.strategies.base import StrategyInputs
from paceline.strategies.local_sgd import LocalSgd
from paceline.strategies.local_sgd.outer import SLOT
from paceline.strategies.precision import Precision
from paceline.strategies.tuning import Tuning
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from paceline.world import alone as one_process

FEATURES, CLASSES, STEPS = 6, 3, 12
RATE = 0.05
BOUND = STEPS * 2**-23 * (4 * 24 * RATE + 8)
"""Gradients of size 4 at most, over 24 samples, summed in another order; means of weights below 2, rounded a few times."""


def data(samples: int = 61) -> TensorDataset:
    features = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(features, features[:, :CLASSES].argmax(1))


def loss(model: nn.Module, batch: list[Tensor]) -> paceline.Loss:
    return paceline.Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


def make(kind: str) -> nn.Module:
    middle = [nn.BatchNorm1d(8)] if kind == "normalised" else []
    return nn.Sequential(nn.Linear(FEATURES, 8), *middle, nn.Tanh(), nn.Linear(8, CLASSES))


def optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=RATE)


def train(run: paceline.Run, cases: list[dict[str, Any]], killed: str | None = None) -> list[dict[str, Any]]:
    """Train each case in a run of its own; rank 1 dies once at step 5 where `killed` names the file that says so."""
    made = []
    for case in cases:
        known = {"tuning", "out", "resume", "save_every", "shards"}
        options = {name: value for name, value in case.items() if name in known}
        own = (
            run
            if killed is not None
            else paceline.Run(run.world, replace(run._engine.state.options, **options))
        )
        replica = own._engine.preparation.prepare_replica(
            partial(make, case.get("model", "plain")), partial(optimizer, case.get("optimizer", "sgd"))
        )
        losses = []
        for step in own.steps(
            data(case.get("samples", 61)),
            batch_size=case.get("batch_size", 24),
            steps=case.get("steps", STEPS),
        ):
            if killed is not None and own.world.rank == 1 and step.number == 5 and not Path(killed).exists():
                Path(killed).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(step.compute(loss).loss)
            if step.number + 1 == case.get("saved"):
                replica.synchronize()
                own.save()
        apart = [value.clone() for value in replica.model.parameters()]
        state = own._engine.state.replica.state()
        made.append({"state": state, "losses": losses, "apart": apart, "sha": weights_sha256(state["model"])})
    return made


def launch(
    strategy: str, workers: int, cases: list[dict[str, Any]], **options: Any
) -> list[list[dict[str, Any]]]:
    """Train cases and give, for each, what every worker made of it."""
    launched = {"shards": 6, "threads": 1, "device": "cpu", **options}
    by_rank = paceline.launch(train, cases, strategy=strategy, workers=workers, **launched)
    return [list(results) for results in zip(*by_rank, strict=True)]


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_one_local_step_of_plain_sgd_is_ddp() -> None:
    # 61 samples in batches of 24: the last one has 13. Then last ones of 2, and of nothing else: workers without a sample.
    cases: list[dict[str, Any]] = [{}, {"samples": 14, "batch_size": 6}, {"samples": 2}]
    plain = launch("ddp", 3, cases)
    local = launch("local-sgd", 3, [{**case, "tuning": {"local_steps": 1}} for case in cases])
    for together, alone in zip(plain, local, strict=True):
        assert 0 < distance(together[0]["state"]["model"], alone[0]["state"]["model"]) <= BOUND
        assert alone[0]["losses"] == pytest.approx(together[0]["losses"], abs=4 * BOUND)
        assert len({one["sha"] for one in alone}) == 1


def test_warm_up_is_ddp_to_the_bit_and_one_worker_is_one_process() -> None:
    warm = {"tuning": {"local_warmup": STEPS, "local_steps": 4}, "optimizer": "adamw", "model": "normalised"}
    (together,) = launch("ddp", 3, [{"optimizer": "adamw", "model": "normalised"}])
    (local,) = launch("local-sgd", 3, [warm])
    (one,) = launch("single", 1, [{"optimizer": "adamw"}])
    (alone,) = launch("local-sgd", 1, [{"optimizer": "adamw", "tuning": {"local_steps": 4}}])
    assert local[0]["sha"] == together[0]["sha"]
    assert local[0]["losses"] == together[0]["losses"]
    assert alone[0]["sha"] == one[0]["sha"]


def test_between_averages_workers_differ_and_a_state_is_one() -> None:
    # 12 steps with an average every 5: two steps after the last one.
    cases = [{"tuning": {"local_steps": 5}, "optimizer": "adamw", "model": "normalised"}]
    (results,) = launch("local-sgd", 3, cases)
    first, *others = results
    for other in others:
        assert not torch.equal(first["apart"][0], other["apart"][0])
        assert other["sha"] == first["sha"]
        assert other["losses"] == first["losses"], "exact over all workers, so the same on each"
        for name, slots in first["state"]["optimizer"]["state"].items():
            for slot, value in slots.items():
                assert torch.equal(value, other["state"]["optimizer"]["state"][name][slot]), (name, slot)
    assert first["state"]["model"]["1.num_batches_tracked"] == STEPS


def diloco(run: paceline.Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take two periods of three steps, and the same by hand with torch's own optimizer outside."""
    model, reference = make("plain"), make("plain")
    reference.load_state_dict(model.state_dict())
    replica = run._engine.preparation.prepare_replica(model, lambda made: optimizer("sgd", made))
    outer = torch.optim.SGD(reference.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    inner = make("plain")
    inner.load_state_dict(reference.state_dict())
    steps = optimizer("sgd", inner)
    for step in run.steps(data(48), batch_size=24, steps=6):
        # Whole batches of equal shards: every worker has learned from as much as any other.
        for shard in step.work.shards:
            steps.zero_grad()
            (batch,) = shard.batches
            loss(inner, batch).total.div(len(batch[0])).backward()
            steps.step()
        step.compute(loss)
        if step.number in (2, 5):
            for kept, moved in zip(reference.parameters(), inner.parameters(), strict=True):
                mean = run.world.comm.all_reduce(moved.detach()) / run.world.size
                kept.grad = kept.detach() - mean
            outer.step()
            inner.load_state_dict(reference.state_dict())
    state = replica.state()
    momenta = {name: slots[SLOT] for name, slots in state["optimizer"]["state"].items()}
    names = {name: outer.state[value]["momentum_buffer"] for name, value in reference.named_parameters()}
    wanted = {**reference.state_dict(), **{f"momentum {name}": -value for name, value in names.items()}}
    return wanted, {**state["model"], **{f"momentum {name}": value for name, value in momenta.items()}}


def test_the_outer_optimizer_is_torchs_nesterov() -> None:
    tuning = {"local_steps": 3, "outer_optimizer": "nesterov"}
    options = {"strategy": "local-sgd", "workers": 2, "threads": 1, "device": "cpu", "tuning": tuning}
    for wanted, found in paceline.launch(diloco, **options):
        assert wanted.keys() == found.keys()
        assert distance(wanted, found) <= BOUND


@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_a_checkpoint_between_averages_goes_on_with_the_same_workers_and_with_others(
    outer: str, tmp_path: Path
) -> None:
    tuning = {"local_steps": 5, "outer_optimizer": outer}
    case = {"tuning": tuning, "optimizer": "adamw"}
    whole = {**case, "out": tmp_path / "run", "saved": 7}
    ((first, *_),) = launch("local-sgd", 3, [whole])
    resumed = {**case, "out": tmp_path / "run", "resume": True}
    (tmp_path / "run" / "checkpoints" / "step-12").rename(tmp_path / "away")
    ((again, *_),) = launch("local-sgd", 3, [resumed])
    assert again["sha"] == first["sha"], "the optimizers' state and the outer momentum were saved"
    (tmp_path / "run" / "checkpoints" / "step-12").rename(tmp_path / "away too")
    ((fewer, *_),) = launch("local-sgd", 2, [resumed])
    assert fewer["sha"] != first["sha"]
    assert distance(fewer["state"]["model"], first["state"]["model"]) < 0.2


@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_a_lost_worker_is_survived(outer: str, tmp_path: Path) -> None:
    tuning = {"local_steps": 4, "outer_optimizer": outer, "outer_lr": 1.0, "outer_momentum": 0.1}
    results = paceline.launch(
        train, [{"steps": 60}], str(tmp_path / "killed"), strategy="local-sgd", workers=3, shards=6, threads=1,
        device="cpu", tuning=tuning,
    )  # fmt: skip
    assert (tmp_path / "killed").exists()
    assert len({result[0]["sha"] for result in results}) == 1
    losses = results[0][0]["losses"]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def lose_one_before_the_mean(run: paceline.Run, killed: str) -> tuple[int, int, str]:
    """Rank 1 dies behind its own update in the last step of a period, where the others wait for its share of the mean."""
    made = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    _, stepper = run.prepare(
        made,
        torch.optim.SGD(made.parameters(), lr=RATE),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
    )
    taken = 0

    def count(*_: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == 6 and run.world.rank == 1 and not Path(killed).exists():
            Path(killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    stepper.register_step_post_hook(count)
    for step in run.steps(data(72), batch_size=24, steps=9):
        step.compute(loss)
    counted: Any = made[1].num_batches_tracked
    return taken, int(counted), run.weights_sha256()


@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_a_step_is_taken_once_where_its_mean_breaks(outer: str, tmp_path: Path) -> None:
    results = paceline.launch(
        lose_one_before_the_mean, str(tmp_path / "killed"), strategy="local-sgd", workers=3, shards=6, threads=1,
        device="cpu", local_steps=3, outer_optimizer=outer,
    )  # fmt: skip
    assert (tmp_path / "killed").exists()
    assert (9, 9) in {result[:2] for result in results}
    assert not any(result[0] > 9 or result[1] != 9 for result in results)
    assert len({result[2] for result in results}) == 1


def digits(run: paceline.Run) -> dict[str, Any]:
    return trainer.main(run, TrainSpec(task="paceline.tasks.digits:Digits", name="digits", epochs=5))


def test_digits_reaches_its_accuracy() -> None:
    results = paceline.launch(
        digits, strategy="local-sgd", workers=3, shards=3, threads=1, device="cpu", tuning={"local_steps": 8}
    )
    assert results[0]["metrics"]["accuracy"] >= 0.95
    assert results[0]["exactness"] == "statistical"
    assert len({result["weights_sha256"] for result in results}) == 1


def test_more_than_statistical_is_refused() -> None:
    with pytest.raises(paceline.InputError, match="numeric' is more than strategy='local-sgd' can give"):
        paceline.launch(digits, strategy="local-sgd", workers=2, shards=2, exact="numeric", device="cpu")


def test_the_replica_of_a_group_before_is_not_kept() -> None:
    given = StrategyInputs(
        make_model=partial(make, "plain"),
        make_optimizer=partial(optimizer, "sgd"),
        make_scheduler=lambda _: None,
        precision=Precision("fp32", torch.device("cpu")),
        shards=1,
        tuning=Tuning(outer_optimizer="nesterov"),
    )
    before = LocalSgd().prepare(given, one_process())
    gone = weakref.ref(before)
    after = LocalSgd().prepare(replace(given, previous=before, weights_in_sync=True), one_process())
    del before
    gc.collect()
    assert gone() is None
    assert after.placement.carried["outer"] is not None

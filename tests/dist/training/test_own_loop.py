"""A loop of the user's own on `Run` gives what a Task gives; a loop that gets it wrong is told what is wrong."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.checkpoint import load
from paceline.errors import InputError
from tests.contract.jobs import Job
from tests.contract.training import train
from tests.dist.training import loops

WAYS = [("single", 1), ("dp", 2), ("ddp", 2)]


def same(left: loops.Weights, right: loops.Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(("strategy", "workers"), WAYS)
def test_the_loop_of_the_design_is_the_task(strategy: str, workers: int) -> None:
    # Two shards, so that ddp with two workers is bit-equal too.
    jobs = {
        "plain": Job(options={"shards": 2}),
        "clipped": Job(options={"shards": 2}, settings={"max_grad_norm": "0.05"}),
    }
    wanted = train(jobs, strategy, workers)
    for name, max_grad_norm in (("plain", None), ("clipped", 0.05)):
        results = paceline.launch(
            loops.design, max_grad_norm, 20, workers=workers, strategy=strategy, shards=2, threads=1
        )
        for weights, loss, number in results:
            assert same(weights, wanted[name].weights)
            assert (loss, number) == (wanted[name].result["loss"], 20)


def test_evaluate() -> None:
    one = paceline.launch(loops.measure, strategy="single", shards=4, threads=1)
    three = paceline.launch(loops.measure, workers=3, shards=4, threads=1)
    assert one[0]["samples"] == 103
    assert three == one * 3


def test_a_skipped_batch_has_no_weight() -> None:
    # 16 samples in 4 shards of 4: the batch of number 5 stays out, which is all that its worker had to do.
    one = paceline.launch(loops.skip, 5, strategy="single", shards=4, threads=1)[0]
    four = paceline.launch(loops.skip, 5, workers=4, threads=1)
    everything = paceline.launch(loops.skip, -1, strategy="single", shards=4, threads=1)[0]
    assert (one[1], everything[1]) == (36.0, 48.0)
    for weights, total in four:
        assert total == 36.0
        # Three sums of four numbers each, at most 16 * 16 * 2 in size, in another order, times lr and steps.
        assert all(
            torch.allclose(weights[name], one[0][name], rtol=0, atol=3 * 0.01 * 512 * 4 * 2**-23)
            for name in weights
        )
    assert not same(one[0], everything[0])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("apply", r"step 0 was left without step.apply\(\).* To accumulate, .*micro_batch="),
        ("once", r"step 0.*apply.*once"),
        ("backward", "step.backward was never called"),
        ("batches", r"step 1.*batches"),
        ("rest", r"step 0.*batches"),
        ("weight", "a sum and its weight"),
        ("sum", r"shape \(\d,\); it must be one number"),
    ],
)
def test_a_loop_that_gets_it_wrong(what: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        paceline.launch(loops.forget, what, strategy="single", shards=2)


def test_more_ways_to_get_it_wrong() -> None:
    with pytest.raises(InputError, match="Prepare first"):
        paceline.launch(loops.unprepared)
    with pytest.raises(InputError, match=r"metrics\(\) must return a dict of paceline.Mean"):
        paceline.launch(loops.measure_wrongly)
    with pytest.raises(InputError, match=r"Loss.total is a float"):
        paceline.launch(loops.forget, "loss")


def test_a_loop_on_two_workers_that_leaves_the_rest_of_its_batches() -> None:
    with pytest.raises(InputError, match=r"step 0.*batches"):
        paceline.launch(loops.forget, "rest", workers=2, shards=4)


@pytest.mark.parametrize(("strategy", "what"), [("ddp", "hash"), ("fsdp", "evaluation"), ("ddp", "save")])
def test_what_takes_all_workers_is_not_asked_by_one(strategy: str, what: str, tmp_path: Path) -> None:
    name = {"hash": "run.weights_sha256", "evaluation": "run.evaluate", "save": "run.save"}[what]
    with pytest.raises(
        InputError, match=rf"^rank 0 called {name}\(\), and rank 1 has not .* All workers must"
    ):
        paceline.launch(
            loops.alone, what, strategy=strategy, workers=2, threads=1, hang_timeout=2.5, out=tmp_path / "run"
        )


def test_a_note_reaches_whoever_launches(capfd: pytest.CaptureFixture[str]) -> None:
    paceline.launch(loops.listed, strategy="single", shards=1, threads=1)
    assert (
        "note: the data is a list of 7 samples, the first of Tensor[8, 6], Tensor[8]. If that is a batch of 8"
        in (capfd.readouterr().err)
    )


def dawdle(run: paceline.Run) -> int:
    """Take a step, then twice as long for something else as a worker may hang, before and behind an evaluation."""
    starts = 0
    data = [(torch.ones(3), torch.ones(1))] * 4
    model = torch.nn.Linear(3, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(data, batch_size=4, epochs=1):
        starts += step.number == 0
        for features, wanted in step:
            step.backward((model(features) - wanted).square().flatten())
        step.apply()
    time.sleep(1.5)
    run.evaluate(data, lambda model, batch: {"mean": paceline.Mean(model(batch[0]).sum(), 4)})
    time.sleep(1.5)
    return len(run._engine.state.recoveries)


def test_work_behind_the_steps_is_no_hang() -> None:
    assert paceline.launch(dawdle, strategy="single", hang_timeout=0.7, max_restarts=0) == (0,)


def keep_the_best(run: paceline.Run) -> float:
    """Measure and save where the run itself has just saved: at the end of an epoch, and behind the last step."""
    model = torch.nn.Linear(1, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    best = run.register("best", {"error": float("inf")})
    data = torch.utils.data.TensorDataset(torch.linspace(0, 1, 16).reshape(-1, 1))

    def error(model: torch.nn.Module, batch: Any) -> dict[str, paceline.Mean]:
        return {"error": paceline.Mean((model(batch[0]) - 3 * batch[0]).pow(2).sum(), len(batch[0]))}

    def measure(_: int) -> None:
        best["error"] = run.evaluate(data, error)["error"]
        run.save()

    for step in run.steps(data, batch_size=8, epochs=2, after_epoch=measure):
        for (inputs,) in step:
            step.backward((model(inputs) - 3 * inputs).pow(2).flatten())
        step.apply()
    best["error"] = -run.evaluate(data, error)["error"]
    run.save()
    return float(best["error"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_score_is_saved_at_a_step_that_was_saved_already(strategy: str, tmp_path: Path) -> None:
    options: Any = {"strategy": strategy, "workers": 2, "shards": 2, "threads": 1, "save_every": "2"}
    scores = paceline.launch(keep_the_best, out=tmp_path / "run", **options)
    saved = load(tmp_path / "run" / "checkpoints" / "step-4").state
    assert saved["loop"]["best"]["error"] == scores[0] < 0
    assert paceline.launch(keep_the_best, out=tmp_path / "run", resume=True, **options) == scores

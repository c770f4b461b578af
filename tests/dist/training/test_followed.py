"""What follows a task on its way is the same on any number of workers, after a resume and after the loss of a worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline.checkpoint import export
from paceline.errors import InputError
from tests.dist.training.followed import Followed, Tied, work

OPTIONS = ("resume", "save_every", "peer_snapshots", "shard_optimizer")
SAME = ("steps", "samples", "loss", "metrics", "weights_sha256", "stopped_early")


def follow(
    folder: Path, strategy: str, workers: int, faults: list[tuple[str, int, int]] | None = None, **asked: Any
) -> Any:
    """Train in workers and return what each of them returned."""
    options = {name: asked.pop(name) for name in OPTIONS if name in asked}
    folder.mkdir(exist_ok=True)
    return paceline.launch(
        work,
        faults or [],
        str(folder),
        workers=workers,
        strategy=strategy,
        shards=4,
        threads=1,
        device="cpu",
        out=folder / "run",
        kwargs={**asked, "predict": folder / "predictions.safetensors"},
        **options,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the folder and the outcome of one process that nothing happened to."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, follow(folder, "single", 1)[0]


def test_one_process_follows_itself(alone: tuple[Path, Any]) -> None:
    folder, (result, log, committed) = alone
    assert [one[0] for one in log["steps"]] == list(range(1, 31))
    assert [one[0] for one in log["evals"]] == [5, 10, 15, 20, 25, 30]
    assert [one[3] for one in log["evals"]] == [True, True, True, False, False, False]
    assert [(one[0], one[1]) for one in log["epochs"]] == [(0, 8), (1, 16), (2, 24)]
    assert {one[5] for one in log["steps"]} == {8, 5}
    assert len({one[6] for one in log["steps"]}) == 30
    assert result["stopped_early"]
    assert result["steps"] == 30
    best = folder / "run" / "checkpoints" / "step-15"
    assert result["best"] == {"step": 15, "metric": "score", "value": 0.0, "path": str(best)}
    # The two best, the earlier one of two that are equal, and the last.
    assert sorted(one.name for one in best.parent.iterdir()) == ["step-10", "step-15", "step-30"]
    assert committed == [5, 10, 15, 30]
    assert result["predictions"]["rows"] == 45


def assert_same(folder: Path, outcomes: Any, alone: tuple[Path, Any]) -> None:
    expected, log, _ = alone[1]
    for result, found, _ in outcomes:
        assert found == log
        assert {name: result[name] for name in SAME} == {name: expected[name] for name in SAME}
        assert result["best"]["step"] == 15
    names = {one.name for one in (folder / "run" / "checkpoints").iterdir()}
    assert names >= {"step-10", "step-15", "step-30"}
    written = [(one / "predictions.safetensors").read_bytes() for one in (folder, alone[0])]
    assert written[0] == written[1]
    assert sorted(one.name for one in folder.iterdir() if one.name.startswith(".")) == []


def test_workers_that_are_killed_change_nothing(tmp_path: Path, alone: tuple[Path, Any]) -> None:
    """In a step, in the evaluation of a step's body, and in the one that ends the run; whoever joins knows all."""
    faults = [("reduction", 7, 1), ("evaluation", 15, 0), ("evaluation", 30, 1)]
    assert_same(tmp_path, follow(tmp_path, "ddp", 2, faults), alone)


def test_a_run_that_was_cut_short_and_lost_its_state(tmp_path: Path, alone: tuple[Path, Any]) -> None:
    """Left at step 12 and taken up again; then a worker takes its rows with it, and steps are taken again from a checkpoint."""
    first = follow(tmp_path, "fsdp", 2, steps=12, save_every=4)
    assert {result["steps"] for result, *_ in first} == {12}
    assert first[0][1]["evals"] == alone[1][1]["evals"][:2]
    outcomes = follow(tmp_path, "fsdp", 2, [("evaluation", 20, 1)], resume=True, save_every=100)
    assert_same(tmp_path, outcomes, alone)
    ((result, log, committed),) = follow(tmp_path, "single", 1, resume=True)
    # It is at its end: nothing is taken again, and nothing told again beside what was told when the last one was written.
    assert (log, [*committed, 30], result["steps"]) == (alone[1][1], outcomes[0][2], 30)
    assert (result["metrics"], result["best"]["step"]) == (alone[1][0]["metrics"], 15)


@pytest.mark.parametrize(("strategy", "options"), [("ddp", {"shard_optimizer": True}), ("ps", {})])
def test_averages_that_lie_elsewhere_are_evaluated(
    strategy: str, options: dict[str, Any], tmp_path: Path, alone: tuple[Path, Any]
) -> None:
    """With one owner for each weight, and on servers; a worker is lost in the middle of an evaluation."""
    outcomes = follow(tmp_path, strategy, 2, [("evaluation", 20, 1)], save_every=6, **options)
    assert_same(tmp_path, outcomes, alone)


def test_what_leaves_a_run_is_what_it_evaluated(tmp_path: Path, alone: tuple[Path, Any]) -> None:
    run = alone[0] / "run"
    predicted = load_file(alone[0] / "predictions.safetensors")["output"]
    features = Followed().eval_data().tensors[0]

    def exported(average: bool | None) -> nn.Module:
        model = Followed().model()
        model.load_state_dict(
            load_file(export(run, tmp_path / f"{average}.safetensors", average=average).path)
        )
        return model.eval()

    def loaded(average: bool | None) -> nn.Module:
        return paceline.load(run, task=Followed, average=average)

    for made in (exported, loaded):
        for average in (None, True):
            torch.testing.assert_close(made(average)(features), predicted)
        assert not torch.allclose(made(False)(features), predicted)


def test_a_hook_that_writes_to_the_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Writing\.on_step changed weights or buffers of the model"):
        follow(tmp_path, "single", 1, task="Writing")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [one["step"] for one in events if one["kind"] == "step"] == [1]


def test_a_hook_may_replace_a_layer_without_weights(tmp_path: Path) -> None:
    ((result, *_),) = follow(tmp_path, "single", 1, task="Replacing", steps=3)
    assert result["steps"] == 3


@pytest.mark.parametrize(
    ("where", "attribute", "value", "strategy"),
    [
        ("model", "batch_size", "16", "single"),
        ("loss", "precision", "bf16", "single"),
        ("on_step", "micro_batch", "2", "ddp"),
        ("on_epoch", "max_grad_norm", "0.01", "ddp"),
        ("on_epoch", "epochs", "99", "single"),
    ],
)
def test_a_declared_value_that_is_set_in_the_run_is_refused(
    where: str, attribute: str, value: str, strategy: str, tmp_path: Path
) -> None:
    """The run has read it once, and would go on with what it read."""
    asked = {"where": where, "attribute": attribute, "value": value}
    with pytest.raises(InputError, match=f"^{attribute} of Setting has changed since .* would be ignored"):
        follow(tmp_path, strategy, 1 if strategy == "single" else 2, task="Setting", settings=asked)


def test_a_model_is_loaded_with_the_averages_that_were_evaluated(tmp_path: Path) -> None:
    """Tied weights too; the weights as they were trained are had by asking."""
    result = paceline.train(Tied, out=tmp_path, threads=1, progress=False)

    def score(model: torch.nn.Module) -> float:
        with torch.no_grad():
            error = Tied().metrics(model, Tied.points)["error"]
        return float(error.total) / float(error.weight)

    assert score(result.model()) == pytest.approx(result.metrics["error"], rel=1e-6)
    best = result.json["best"]
    assert score(paceline.load(best["path"])) == pytest.approx(best["value"], rel=1e-6)
    trained = paceline.load(tmp_path, average=False)
    assert score(trained) < 0.8 * result.metrics["error"]
    names = trained.state_dict().keys()
    assert all(
        not torch.equal(trained.state_dict()[name], result.model().state_dict()[name]) for name in names
    )

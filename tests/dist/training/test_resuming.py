"""Taking up a run: what does not fit is refused, what is damaged is told and passed over."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.checkpoint.durable import sync_and_hash
from paceline.checkpoint.manifest import EXTRA_STATE, Manifest
from paceline.errors import InputError
from paceline.training import trainer
from paceline.training.spec import TrainSpec


def train(
    out: Path, task: str = "tests.contract.tasks:Classify", *, steps: int = 8, **given: Any
) -> dict[str, Any]:
    spec = TrainSpec(
        task=task,
        name="task",
        steps=steps,
        batch_size=given.pop("batch_size", None),
        overrides={"seed": given.pop("seed", 0)},
    )
    options = {"strategy": "single", "threads": 1, "out": out, **given}
    result: dict[str, Any] = paceline.launch(trainer.main, spec, **options)[0]
    return result


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a run of 6 steps in 2 shards that saved every second one, and nobody may change."""
    out = tmp_path_factory.mktemp("resuming") / "run"
    train(out, steps=6, shards=2, save_every="2")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-2", "step-4", "step-6"]
    return out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"resume": True, "seed": 1}, "has seed 0, not 1"),
        ({"resume": True, "shards": 3}, "has shards 2, not 3"),
        ({"resume": True, "batch_size": 9}, "has batches of 8 samples, not of 9"),
        ({"resume": True, "strategy": "ddp", "workers": 3}, "has 2 shards, so at most 2 workers"),
        ({}, "already holds a run. Add resume=True"),
        (
            {"resume": True, "task": "tests.dist.training.broken:Wider"},
            r"another model: missing 4.weight, 4.bias, shape of 0.weight is \(16, 6\) there and \(20, 6\) here",
        ),
    ],
)
def test_what_does_not_fit_is_refused(run: Path, given: dict[str, Any], words: str) -> None:
    spec = (run / "spec.json").read_text()
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    with pytest.raises(InputError, match=words) as caught:
        train(run, **given)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
    assert (run / "spec.json").read_text() == spec, "what was refused must not speak for the run"


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no run in"):
        train(tmp_path / "none", resume=True)


def test_an_optimizer_that_does_not_take_what_was_saved(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(run, out)
    path = out / "checkpoints" / "step-6"
    rest = torch.load(path / EXTRA_STATE, weights_only=True)
    rest["optimizer"]["state"]["nowhere"] = {"count": 1}
    torch.save(rest, path / EXTRA_STATE)
    manifest = Manifest.read(path)
    dataclasses.replace(
        manifest, files=manifest.files | {EXTRA_STATE: sync_and_hash(path / EXTRA_STATE)}
    ).write(path)
    with pytest.raises(InputError, match=r"step-6 cannot be used: its state was not taken \(\w+: ") as caught:
        train(out, resume=True)
    assert "\n" not in str(caught.value)


def test_a_damaged_newest_checkpoint_is_told_and_passed_over(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(run, out)
    weights = out / "checkpoints" / "step-6" / "part-0.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    resumed = train(out, resume=True)
    whole = train(tmp_path / "whole", shards=2)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    told = [event for event in events if "reason" in event]
    assert [event["reason"] for event in told] == ["part-0.safetensors is 3 bytes short"]
    assert told[0]["path"].endswith("step-6")


def test_all_damaged(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(run, out)
    for manifest in out.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(InputError, match="is whole, so there is nothing to resume from"):
        train(out, resume=True)


def test_a_mistake_late_in_a_run_does_not_cost_its_checkpoints(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(InputError, match=r"not a paceline\.Loss"):
        train(out, "tests.dist.training.broken:BareTensorLater", save_every="2")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-2", "step-4"]
    assert json.loads((out / "spec.json").read_text())["options"]["save_every"] == "2"


def test_a_mistake_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(InputError, match=r"not a paceline\.Loss"):
        train(out, "tests.dist.training.broken:BareTensor", save_every="2")
    assert not out.exists()


def fitted(run: paceline.Run, steps: int) -> tuple[Any, ...]:
    model = torch.nn.Linear(3, 2)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 72).reshape(24, 3))
    for step in run.steps(data, batch_size=8, steps=steps):
        for (x,) in step:
            step.backward(model(x).square().sum(1))
        step.apply()
    told, threads = run._engine.state.options, torch.get_num_threads()
    kept = (
        told.strategy,
        told.workers,
        told.precision,
        told.seed,
        told.save_every,
        told.keep,
        told.total_shards,
    )
    return *kept, threads, run.weights_sha256()


def test_a_loop_of_ones_own_goes_on_with_the_options_it_was_begun_with(tmp_path: Path) -> None:
    begun = {"workers": 2, "strategy": "fsdp", "precision": "bf16", "seed": 7, "save_every": 2, "keep": 5}
    whole = paceline.launch(fitted, 6, **begun, shards=4, threads=1, out=tmp_path / "whole")
    paceline.launch(fitted, 4, **begun, shards=4, threads=1, out=tmp_path / "run")
    assert paceline.launch(fitted, 6, resume=True, out=tmp_path / "run") == whole
    assert whole[0][:-1] == ("fsdp", 2, "bf16", 7, "2", 5, 4, 1)


def test_what_a_loop_of_ones_own_cannot_keep_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = {"workers": 2, "compress": "bf16", "out": tmp_path / "run"}
    paceline.launch(fitted, 2, **begun, threads=1)
    [told] = paceline.launch(fitted, 4, strategy="single", resume=True, out=tmp_path / "run")
    assert told[:2] == ("single", 1)
    shown = capsys.readouterr().err
    assert "note: the run had 2 workers; strategy='single' goes on with 1 here." in shown
    assert (
        "note: the run had compress='bf16', which strategy='single' has no use for: it is left out." in shown
    )


def epochs(out: Path) -> list[Any]:
    lines = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    return [(one["epoch"], one["loss"]) for one in lines if one["kind"] == "epoch"]


@pytest.mark.parametrize("resumed", [{"strategy": "single"}, {"strategy": "ddp", "workers": 2}])
def test_the_loss_of_an_epoch_is_of_all_its_steps_also_where_it_was_resumed(
    tmp_path: Path, resumed: dict[str, Any]
) -> None:
    train(tmp_path / "whole", steps=14, shards=2)
    train(tmp_path / "resumed", steps=4, shards=2)
    train(tmp_path / "resumed", steps=14, shards=2, resume=True, **resumed)
    assert len(epochs(tmp_path / "whole")) >= 1
    assert epochs(tmp_path / "resumed") == epochs(tmp_path / "whole")

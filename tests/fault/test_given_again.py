"""A step that is given once more begins as it did, whatever the loop's body did in the attempt that a lost worker broke."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import paceline
from tests.fault.survivors import BATCH, Samples, hashed, set_off

STEPS = 9
Faults = list[tuple[str, int, int, str]]


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(run: paceline.Run, folder: str, faults: Faults, kind: str) -> list[Any]:
    """Change what a loop can, before and behind `step.apply`, and never ask whether the step is given once more."""
    model, optimizer = run.prepare(make, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    notes = run.register_state("notes", {"before": 0, "behind": 0})
    schedule = run.register_state("schedule", torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
    average = run.register_state("average", AveragedModel(model)) if run.choice.name != "fsdp" else None
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS):
        optimizer.param_groups[0]["lr"] *= 0.99
        notes["before"] += 1
        if kind == "weights before":
            shrink(model)
        set_off(run, folder, faults, "loop")
        for features, labels in step:
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
        step.apply()
        if kind == "saves" and step.number in (2, 5):
            run.save()
        schedule.step()
        notes["behind"] += 1
        if average is not None:
            average.update_parameters(model)
        if kind != "states":
            shrink(model)
    return [
        run.weights_sha256(),
        dict(notes),
        schedule.get_last_lr(),
        None if average is None else hashed(average),
    ]


def shrink(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.9)


def launch(folder: Path, faults: Faults, kind: str, **options: Any) -> Any:
    folder.mkdir()
    chosen = {"workers": 2, "shards": 2, "out": folder / "run", **options}
    return paceline.launch(train, str(folder), faults, kind, threads=1, device="cpu", **chosen)


@pytest.mark.parametrize("kind", ["states", "weights", "weights before", "saves"])
@pytest.mark.parametrize(
    ("strategy", "options"), [("ddp", {}), ("fsdp", {}), ("fsdp", {"peer_copies": 1, "copy_every": 1})]
)
def test_what_a_body_does_is_done_once_a_step(
    kind: str, strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    quiet = launch(tmp_path / "quiet", [], kind, strategy="single", workers=1)
    # Behind the body that saves, in which the fault comes before anything of the next step is counted.
    found = launch(tmp_path / "killed", [("loop", 6, 1, "kill")], kind, strategy=strategy, **options)
    assert set(tmp_path.glob("killed/fault-*"))
    for one in found:
        assert one[:3] == quiet[0][:3]
        assert one[3] in (quiet[0][3], None)


def test_what_a_body_does_behind_run_save_is_there_when_the_run_is_resumed(tmp_path: Path) -> None:
    """The body that saves goes on: rates, registered states and weights."""
    quiet = launch(tmp_path / "quiet", [], "saves", strategy="single", workers=1)
    with pytest.raises(paceline.PacelineError):
        launch(tmp_path / "cut", [("loop", 7, None, "raise")], "saves", strategy="ddp", max_restarts=0)
    (tmp_path / "cut").rename(tmp_path / "was")
    (tmp_path / "cut").mkdir()
    (tmp_path / "was" / "run").rename(tmp_path / "cut" / "run")
    saved = {one.name for one in (tmp_path / "cut" / "run" / "checkpoints").iterdir()}
    assert saved == {"step-3", "step-6"}
    found = paceline.launch(
        train, str(tmp_path / "cut"), [], "saves", strategy="ddp", workers=2, shards=2, threads=1,
        device="cpu", out=tmp_path / "cut" / "run", resume=True,
    )  # fmt: skip
    assert list(found) == [quiet[0]] * 2


def save_and_break(run: paceline.Run, second: str) -> int:
    model, _ = run.prepare(make, lambda made: torch.optim.SGD(made.parameters(), lr=0.05))
    for call in range(2):
        for step in run.steps(Samples(), batch_size=BATCH, steps=4):
            for features, labels in step:
                step.backward(F.cross_entropy(model(features), labels, reduction="none"))
            step.apply()
            if call == 0 and step.number == 1:
                run.save()
                break
        if second == "saved behind":
            run.save()
        if second == "none":
            break
    return run.position.number


def test_a_body_that_saves_and_leaves_the_loop(tmp_path: Path) -> None:
    """Its checkpoint is written behind the loop, where the function ends or saves; in front of another loop it has no place."""
    assert paceline.launch(save_and_break, "none", out=tmp_path / "a") == (2,)
    assert [one.name for one in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-2"]
    assert paceline.launch(save_and_break, "saved behind", out=tmp_path / "b") == (6,)
    assert (tmp_path / "b" / "checkpoints" / "step-2").is_dir()
    with pytest.raises(paceline.PacelineError, match=r"Call run\.save\(\) behind the loop"):
        paceline.launch(save_and_break, "another", out=tmp_path / "c")


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_schedule_that_no_checkpoint_holds_is_refused(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(paceline.PacelineError, match=r"a StepLR of its own that no checkpoint holds"):
        paceline.launch(
            own_schedule, workers=2 if strategy == "ddp" else 1, strategy=strategy, out=tmp_path / "run"
        )


def own_schedule(run: paceline.Run) -> None:
    model, optimizer = run.prepare(make, lambda made: torch.optim.SGD(made.parameters(), lr=0.05))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for step in run.steps(Samples(), batch_size=BATCH, steps=4):
        for features, labels in step:
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
        step.apply()
        schedule.step()

"""A step that is given once more begins as it did, whatever the loop's body did in the attempt that a lost worker broke."""

from __future__ import annotations

import time
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


class Centred(nn.Sequential):
    """A model whose loop moves a buffer, as DINO moves its centre."""

    def __init__(self) -> None:
        super().__init__(*make().children())
        self.register_buffer("centre", torch.ones(6))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        centre: Any = self.centre
        return super().forward(features + centre)


class Meter:
    """Something of the user's own that is saved with the run."""

    def __init__(self, size: int) -> None:
        self.seen = torch.zeros(size)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"].clone()


def train_hard(run: paceline.Run, folder: str, faults: Faults, kind: str) -> list[Any]:
    """Change one thing that is hard to put back."""
    model: Any
    model, optimizer = run.prepare(
        Centred, lambda made: torch.optim.AdamW(made.parameters(), lr=torch.tensor(0.05))
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    run.register_state("schedule", schedule)
    small, large = run.register_state("small", Meter(3)), run.register_state("large", Meter(5_000))
    changes = {
        "data": lambda: [one.data.mul_(0.9) for one in model.parameters()],
        "buffer": lambda: model.centre.mul_(0.9).add_(0.01),
        "rate": lambda: optimizer.param_groups[0]["lr"].mul_(0.9),
        "schedule": schedule.step,
        "small": lambda: small.seen.add_(1.0),
        "large": lambda: large.seen.add_(1.0),
    }
    what, where = kind.split()
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS):
        with torch.no_grad():
            if where == "before":
                changes[what]()
        set_off(run, folder, faults, "loop")
        for features, labels in step:
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
        step.apply()
        with torch.no_grad():
            if where == "behind":
                changes[what]()
        set_off(run, folder, faults, "behind")
    rate = float(optimizer.param_groups[0]["lr"])
    return [run.weights_sha256(), rate, schedule.last_epoch, float(small.seen.sum()), float(large.seen.sum())]


def train(run: paceline.Run, folder: str, faults: Faults, kind: str) -> list[Any]:
    """Change what a loop can, before and behind `step.apply`, and never ask whether the step is given once more."""
    if " " in kind and kind != "weights before":
        return train_hard(run, folder, faults, kind)
    model, optimizer = run.prepare(make, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    notes = run.register_state("notes", {"before": 0, "behind": 0})
    schedule = run.register_state("schedule", torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
    average = (
        run.register_state("average", AveragedModel(model))
        if run.options.choice.name not in ("fsdp", "local-sgd")
        else None
    )
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS):
        if run.world.size < run.engine.state.workers:
            time.sleep(0.4)  # the one that is missing is on its way, and comes to a run that is steps further
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
    ("strategy", "options"), [("ddp", {}), ("fsdp", {}), ("fsdp", {"peer_snapshots": 1, "snapshot_every": 1})]
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


HARD = ("data", "buffer", "rate", "schedule", "small", "large")


@pytest.mark.parametrize("where", ["before", "behind"])
@pytest.mark.parametrize("what", HARD)
def test_so_is_what_is_hard_to_put_back(what: str, where: str, tmp_path: Path) -> None:
    kind = f"{what} {where}"
    quiet = launch(tmp_path / "quiet", [], kind, strategy="single", workers=1)
    found = launch(tmp_path / "killed", [("loop", 5, 1, "kill")], kind, strategy="ddp")
    assert set(tmp_path.glob("killed/fault-*"))
    assert list(found) == [quiet[0]] * len(found)


@pytest.mark.parametrize("kind", ["states", "weights before"])
def test_a_worker_that_comes_while_a_step_breaks_begins_it_as_the_others_do(
    kind: str, tmp_path: Path
) -> None:
    """An exception is tried once more by a replacement; and one that waits is let in when another worker is lost."""
    quiet = launch(tmp_path / "quiet", [], kind, strategy="single", workers=1, shards=6)
    raised = launch(tmp_path / "raised", [("loop", 5, 1, "raise")], kind, strategy="ddp", shards=6)
    assert list(raised) == [quiet[0]] * 2
    faults = [("loop", 3, 2, "kill"), ("loop", 4, 1, "kill")]
    killed = launch(tmp_path / "killed", faults, kind, strategy="ddp", workers=3, shards=6)
    assert len(set(tmp_path.glob("killed/fault-*"))) == 2
    assert list(killed) == [quiet[0]] * len(killed)


@pytest.mark.parametrize("kind", ["states", "weights"])
def test_so_does_one_where_workers_go_their_own_ways(kind: str, tmp_path: Path) -> None:
    """What a survivor keeps of a step that broke is its own: the newcomer has nothing to average with it."""
    options: Any = {"strategy": "local-sgd", "shards": 6, "tuning": {"local_steps": 4}}
    raised = launch(tmp_path / "raised", [("loop", 5, 1, "raise")], kind, **options)
    assert set(tmp_path.glob("raised/fault-*"))
    assert raised[0] == raised[1]
    assert raised[0][1] == {"before": STEPS, "behind": STEPS}


@pytest.mark.parametrize("rank", [1, 0])
def test_what_the_function_does_before_its_steps_belongs_to_the_beginning(rank: int, tmp_path: Path) -> None:
    """A run that goes back there, and one that is resumed: weights, rates, what trains and a schedule."""
    options: Any = {"shards": 2, "threads": 1, "device": "cpu"}
    (quiet,) = paceline.launch(set_up, str(tmp_path), [], 8, strategy="single", **options)
    fault = [("loop", 4, rank, "kill")]
    assert set(paceline.launch(set_up, str(tmp_path), fault, 8, strategy="fsdp", workers=2, **options)) == {
        quiet
    }
    out = tmp_path / "run"
    paceline.launch(set_up, str(tmp_path), [], 4, strategy="single", out=out, **options)
    resumed = paceline.launch(
        set_up, str(tmp_path), [], 8, strategy="fsdp", workers=2, out=out, resume=True, **options
    )
    assert set(resumed) == {quiet}


def set_up(run: paceline.Run, folder: str, faults: Faults, steps: int) -> tuple[Any, ...]:
    """Do to model and optimizer, between run.prepare and run.steps, what is not to be done to them twice."""
    model, optimizer = run.prepare(make, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    optimizer.param_groups[0]["lr"] = 0.03
    optimizer.param_groups[0]["weight_decay"] = 0.2
    schedule = run.register_state(
        "schedule", torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
    )
    book = run.register_state("book", {"steps": 7})
    book["steps"] = 0
    shrink(model)
    for step in run.steps(Samples(), batch_size=BATCH, steps=steps):
        set_off(run, folder, faults, "loop")
        for features, labels in step:
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
        step.apply()
        schedule.step()
        optimizer.param_groups[0]["weight_decay"] *= 0.9
        book["steps"] += 1
    group = optimizer.param_groups[0]
    return run.weights_sha256(), group["lr"], group["weight_decay"], book["steps"]


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
    return run.engine.state.position.number


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

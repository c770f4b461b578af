"""A step that is given once more begins as it did, whatever the loop's body did in the attempt that a lost worker broke."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import paceline
from paceline.errors import InputError
from paceline.world import fault_points
from tests.fault.survivors import BATCH, Samples, hashed, mean_output, once, set_off
from tests.patience import HANG_S

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
    run.register("schedule", schedule)
    small, large = run.register("small", Meter(3)), run.register("large", Meter(5_000))
    changes = {
        "data": lambda: [one.data.mul_(0.9) for one in model.parameters()],
        "unseen": lambda: [model.centre.data.mul_(0.9), large.seen.data.add_(1.0)],
        "unseen slots": lambda: [one["exp_avg"].data.mul_(0.9) for one in optimizer.state.values()],
        "buffer": lambda: model.centre.mul_(0.9).add_(0.01),
        "rate": lambda: optimizer.param_groups[0]["lr"].mul_(0.9),
        "schedule": schedule.step,
        "small": lambda: small.seen.add_(1.0),
        "large": lambda: large.seen.add_(1.0),
    }
    what, where = kind.rsplit(maxsplit=1)
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS):
        with torch.no_grad():
            if where == "before":
                changes[what]()
        set_off(run, folder, faults, "loop")
        for features, labels in step:
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
        with torch.no_grad():
            if where == "between":
                changes[what]()
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
    notes = run.register("notes", {"before": 0, "behind": 0})
    schedule = run.register("schedule", torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
    average = (
        run.register("average", AveragedModel(model))
        if run._engine.state.options.choice.name not in ("fsdp", "local-sgd")
        else None
    )
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS):
        if run.world.size < run._engine.state.workers:
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


HARD = ("data", "buffer", "rate", "schedule", "small", "large", "unseen", "unseen slots")


@pytest.mark.parametrize(
    "kind",
    [
        *(f"{what} {where}" for what in HARD for where in ("before", "behind")),
        *(f"{what} between" for what in HARD[1:]),
    ],
)
def test_so_is_what_is_hard_to_put_back(kind: str, tmp_path: Path) -> None:
    quiet = launch(tmp_path / "quiet", [], kind, strategy="single", workers=1)
    found = launch(tmp_path / "killed", [("loop", 5, 1, "kill")], kind, strategy="ddp")
    assert set(tmp_path.glob("killed/fault-*"))
    assert list(found) == [quiet[0]] * len(found)


SAVED: list[tuple[int, dict[str, Any]]] = [
    (4, {"strategy": "fsdp", "save_every": 2}),
    (4, {"strategy": "ddp", "shard_optimizer": True, "save_every": 2}),
    (4, {"strategy": "fsdp", "peer_snapshots": 1, "snapshot_every": 1}),
    (0, {"strategy": "fsdp"}),
]


@pytest.mark.parametrize(("number", "options"), SAVED)
@pytest.mark.parametrize("what", ["large", "small"])
def test_so_it_is_where_the_state_comes_from_the_very_step_that_broke(
    what: str, number: int, options: dict[str, Any], tmp_path: Path
) -> None:
    kind = f"{what} before"
    quiet = launch(tmp_path / "quiet", [], kind, strategy="single", workers=1)
    found = launch(tmp_path / "killed", [("loop", number, 1, "kill")], kind, **options)
    assert set(tmp_path.glob("killed/fault-*"))
    assert list(found) == [quiet[0]] * len(found)


def change_of(what: str, model: Any, optimizer: Any, large: Any, copies: Any) -> None:
    """Change one thing, as a loop may."""
    first = optimizer.param_groups[0]
    if what in ("slots", "thawed"):
        for entry in optimizer.state.values():
            entry["momentum_buffer"].mul_(0.5)
    elif what == "replaced":
        for entry in optimizer.state.values():
            entry["momentum_buffer"] = entry["momentum_buffer"] * 0.5
    elif what == "key":
        first["times"] = first.get("times", 0) + 1
        first["lr"] = 0.05 / (1 + first["times"])
    elif what == "list":
        first["seen"].append(1)
        first["lr"] = 0.05 / (1 + len(first["seen"]))
    elif what == "group":
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
    elif what == "freezing":
        model[0].weight.requires_grad_(not model[0].weight.requires_grad)
    elif what == "assigned":
        model.centre = model.centre * 0.9
    elif what == "moved":
        model.centre.mul_(0.9)
    else:
        changes: dict[str, Any] = {
            "cleared": optimizer.state.clear,
            "large": lambda: large["sums"].add_(1.0),
            "numbers": lambda: large["losses"].append(1.0),
            "few": lambda: large["seen"].add_(1.0),
            "copies": lambda: copies.seen.add_(1.0),
        }
        changes[what]()


def train_once(run: paceline.Run, folder: str, faults: Faults, kind: str) -> list[Any]:
    """Change one thing in step 5 alone, in which no body is looked at, or in each."""
    what, where, when = kind.split()

    def optimizer_of(made: Any) -> torch.optim.Optimizer:
        made[2].requires_grad_(what not in ("group", "thawed"))
        trained = [one for one in made.parameters() if one.requires_grad or what == "thawed"]
        optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        optimizer.param_groups[0]["seen"] = []
        return optimizer

    model: Any
    model, optimizer = run.prepare(Centred, optimizer_of)
    large: Any = run.register("large", {"sums": torch.zeros(5_000), "losses": [0.0] * 5_000})
    few = run.register("few", {"seen": torch.zeros(3)})
    copies = run.register("copies", Copies())

    def change(here: str, number: int) -> None:
        if here == where and (when == "always" or number == 5):
            with torch.no_grad():
                change_of(what, model, optimizer, {**large, **few}, copies)

    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS):
        set_off(run, folder, faults, "top")
        change("before", step.number)
        if what == "thawed" and step.number == 5:
            model[2].requires_grad_(True)
        for index, (features, labels) in enumerate(step):
            set_off(run, folder, faults, "batch")
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
            if not index:
                change("within", step.number)
        change("between", step.number)
        step.apply()
        change("behind", step.number)
    recovered = any("was killed" in one["reason"] for one in run._engine.state.recoveries)
    sums = (
        float(large["sums"].sum()),
        len(large["losses"]),
        float(copies.seen.sum()),
        float(few["seen"].sum()),
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    return [[run.weights_sha256(), model.centre.tolist(), rates, sums], recovered]


class Copies(Meter):
    """What it returns of itself is made anew each time."""

    def __init__(self) -> None:
        super().__init__(5_000)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen.clone()}


PUT_BACK = ("key", "list", "group", "freezing")
"""What is put back exactly, so that the survivors go on at once."""
ONCE = (
    *(f"{what} {where} once" for where in ("before", "behind") for what in PUT_BACK),
    *(
        f"{what} before once"
        for what in ("slots", "replaced", "cleared", "assigned", "large", "numbers", "copies")
    ),
    *(
        f"{what} between once"
        for what in ("slots", "cleared", "assigned", "moved", "large", "numbers", "copies", *PUT_BACK[:2])
    ),
    *(f"{what} within once" for what in ("slots", "large", "numbers")),
    "slots before always",
    "slots behind always",
    "cleared behind always",
    "assigned behind once",
    "large behind once",
)


@pytest.mark.parametrize("kind", ONCE)
def test_so_is_what_is_done_in_one_step_alone(kind: str, tmp_path: Path) -> None:
    check_once(kind, tmp_path, "batch")


def check_once(kind: str, tmp_path: Path, place: str) -> None:
    """Compare a run that nothing happens to with one in which a worker is killed in step 5."""
    found = {}
    for name, faults in (("quiet", []), ("killed", [(place, 5, 1, "kill")])):
        (tmp_path / name).mkdir()
        some: Any = {"strategy": "ddp", "workers": 2} if faults else {"strategy": "single"}
        found[name] = paceline.launch(
            train_once, str(tmp_path / name), faults, kind, shards=2, threads=1, device="cpu", **some
        )
    assert set(tmp_path.glob("killed/fault-*"))
    (quiet,) = found["quiet"]
    what, where, _ = kind.split()
    for one in found["killed"]:
        assert one[0] == quiet[0]
        # What was written before `apply` and cannot be put back takes the run back; nothing else does.
        assert one[1] == (what in PUT_BACK or where == "behind")


def test_so_is_what_is_done_in_a_step_that_broke_before_it_began(tmp_path: Path) -> None:
    # The others wait for the lost one where something begins to train, before the first batch.
    check_once("thawed between once", tmp_path, "top")


@pytest.mark.parametrize("what", ["numbers", "few"])
def test_servers_hand_on_no_state_that_only_trainers_change(what: str, tmp_path: Path) -> None:
    kind = f"{what} within always"
    found = {}
    for name, faults in (("quiet", []), ("killed", [("batch", 5, 0, "kill")])):
        (tmp_path / name).mkdir()
        some: Any = {"strategy": "ps", "servers": 1} if faults else {"strategy": "single"}
        found[name] = paceline.launch(
            train_once,
            str(tmp_path / name),
            faults,
            kind,
            workers=1,
            shards=2,
            threads=1,
            device="cpu",
            **some,
        )
    assert set(tmp_path.glob("killed/fault-*"))
    assert found["killed"][0][0] == found["quiet"][0][0]


def miss_the_end(run: paceline.Run, folder: str, faulty: bool, kind: str) -> list[Any]:
    """Rank 2 dies behind the sums of step 4, in which rank 1 stops; rank 0 applies them and goes on with its body."""
    model: Any
    model, optimizer = run.prepare(
        Centred, lambda made: torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9)
    )
    first = optimizer.param_groups[0]

    def fault(point: str) -> None:
        rank, interruption = run.world.rank, run.world.interruption
        here = point == fault_points.OPTIMIZER and run._engine.state.position.number == 4
        if not here or run.world.size < 3 or not once(folder, f"fault-{rank}"):
            return
        if rank == 2:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + HANG_S
        while rank == 1 and not interruption.raised and time.monotonic() < until:
            time.sleep(0.01)
        if rank == 1:
            interruption.check()

    fault_points.set_fault(fault if faulty else None)
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS):
        for features, labels in step:
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
        step.apply()
        with torch.no_grad():
            if kind == "slots":
                for entry in optimizer.state.values():
                    entry["momentum_buffer"].mul_(0.5)
            elif kind == "assigned" and step.number == 4:
                model.centre = model.centre * 0.5
            elif kind == "key" and step.number == 4:
                first["times"] = first.get("times", 0) + 1
                first["lr"] = 0.05 / (1 + first["times"])
    fault_points.set_fault(None)
    own = [value.tolist() for value in model.state_dict().values()]
    return [own, first["lr"], [one["reason"] for one in run._engine.state.recoveries]]


@pytest.mark.parametrize(
    ("kind", "goes_on"), [("none", True), ("key", True), ("slots", False), ("assigned", False)]
)
def test_a_worker_that_missed_the_end_of_a_step_is_not_given_a_state_with_more(
    kind: str, goes_on: bool, tmp_path: Path
) -> None:
    """The one ahead has done the rest of its body to it, and this worker would do so once more: the workers would part."""
    (quiet,) = paceline.launch(
        miss_the_end, str(tmp_path), False, kind, strategy="single", shards=6, threads=1, device="cpu"
    )
    found = paceline.launch(
        miss_the_end, str(tmp_path), True, kind, strategy="ddp", workers=3, shards=6, threads=1, device="cpu"
    )
    assert (tmp_path / "fault-2").exists()
    assert [one[:2] for one in found] == [quiet[:2]] * len(found)
    assert all(("rank 2 was killed by SIGKILL" in one[2]) == goes_on for one in found)


def ask_in_body(run: paceline.Run, folder: str, faults: Faults, kind: str) -> list[Any]:
    """Have all workers find something out inside a step, before or behind `step.apply`."""
    model, optimizer = run.prepare(
        make, lambda made: torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9)
    )
    seen = run.register("seen", {"sum": 0.0})
    what, where = kind.split()

    def ask(here: str, number: int) -> None:
        if here != where or number not in (2, 5):
            return
        set_off(run, folder, faults, "ask")
        if what == "save":
            run.save()
        elif what == "hash":
            run.weights_sha256()
        else:
            seen["sum"] += run.evaluate(Samples(), mean_output)["mean"]
        if what == "writes":
            shrink(model)

    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS):
        ask("top", step.number)
        for features, labels in step:
            ask("batch", step.number)
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
        ask("behind", step.number)
        step.apply()
        if not step.again:
            ask("applied", step.number)
    recovered = any("was killed" in one["reason"] for one in run._engine.state.recoveries)
    return [[run.weights_sha256(), seen["sum"], optimizer.param_groups[0]["lr"]], recovered]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "kind",
    [
        "evaluate top",
        "hash top",
        "save top",
        "evaluate applied",
        "hash applied",
        "save applied",
        "writes top",
    ],
)
def test_a_worker_is_lost_where_the_body_asks_for_something(kind: str, workers: int, tmp_path: Path) -> None:
    found = {}
    for name, faults in (("quiet", []), ("killed", [("ask", 5, 1, "kill")])):
        (tmp_path / name).mkdir()
        some: Any = {"strategy": "ddp", "workers": workers} if faults else {"strategy": "single"}
        found[name] = paceline.launch(
            ask_in_body, str(tmp_path / name), faults, kind, shards=6, threads=1, device="cpu",
            out=tmp_path / name / "run", **some,
        )  # fmt: skip
    assert set(tmp_path.glob("killed/fault-*"))
    assert [one[0] for one in found["killed"]] == [found["quiet"][0][0]] * len(found["killed"])
    assert {one[1] for one in found["killed"]} == {kind != "writes top"}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["evaluate batch", "evaluate behind", "hash behind", "save behind"])
def test_between_its_batches_and_apply_nothing_is_found_out(kind: str, workers: int, tmp_path: Path) -> None:
    """Each worker has gone through other batches there; some strategies hung, others gave other numbers."""
    with pytest.raises(InputError, match=r"was called in the middle of step 2, before step\.apply\(\)"):
        paceline.launch(
            ask_in_body, str(tmp_path), [], kind, shards=6, threads=1, device="cpu", workers=workers,
            strategy="ddp" if workers > 1 else "single", out=tmp_path / "run",
        )  # fmt: skip


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
    schedule = run.register("schedule", torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6))
    book = run.register("book", {"steps": 7})
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
    return run._engine.state.position.number


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

"""A loop whose body goes on behind `apply` with what all do together, while workers are lost and join."""

from __future__ import annotations

import time
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.world import fault_points
from tests.fault.survivors import BATCH, Samples, mean_output, set_off

STEPS = 9
Faults = list[tuple[str, int, int | None, str]]


def train(run: paceline.Run, folder: str, faults: Faults, slow: int | None, where: str) -> Any:
    """Evaluate and save before or behind every step, whether or not it is given once more."""
    late, points = run.world.rank == slow, cycle(["connecting", "agreeing"])
    agreeing = any(point == "agreeing" for point, *_ in faults)
    if agreeing:
        fault_points.set_fault(
            lambda name: set_off(run, folder, faults, next(points) if name == fault_points.REGROUP else name)
        )
    make: Any = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # noqa: E731
    model, _ = run.prepare(make, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    means = run.register("means", {"by step": []})
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS):
        set_off(run, folder, faults, "loop")
        if where == "before":
            means["by step"].append(run.evaluate(Samples(), mean_output)["mean"])
        if any(action == "to 4" for *_, action in faults) and run.world.size < 4 and step.number > 1:
            time.sleep(0.4)  # whoever joins is on the way
        for index, (features, labels) in enumerate(step):
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
            if not index:
                set_off(run, folder, faults, "batch")
        step.apply()
        if where == "behind":
            mean = run.evaluate(Samples(), mean_output)["mean"]
            if step.number % 3 == 1:
                run.save()
            means["by step"].append(mean)
        if late:
            time.sleep(0.15)  # comes to the next step when the others are in the middle of it
            set_off(run, folder, faults, "late")
    reasons = [(one["reason"], one["workers"]) for one in run._engine.state.recoveries]
    return [run.weights_sha256(), means["by step"]], reasons


def launch(
    folder: Path, faults: Faults, slow: int | None = None, where: str = "behind", **options: Any
) -> Any:
    folder.mkdir()
    chosen = {"workers": 3, "shards": 6, "strategy": "ddp", "out": folder / "run", **options}
    return paceline.launch(train, str(folder), faults, slow, where, threads=1, device="cpu", **chosen)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launch(tmp_path_factory.mktemp("one") / "quiet", [], strategy="single", workers=1)[0][0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("action", "options"),
    [("kill", {"min_workers": 3}), ("kill", {}), ("raise", {})],
)
@pytest.mark.parametrize("slow", [None, 0])
def test_what_it_comes_to_is_the_same(
    strategy: str, action: str, options: dict[str, Any], slow: int | None, tmp_path: Path, quiet: Any
) -> None:
    if strategy == "fsdp":
        options = {**options, "peer_snapshots": 1, "snapshot_every": 1}
    for found, reasons in launch(
        tmp_path / "hit", [("batch", 4, 1, action)], slow, strategy=strategy, **options
    ):
        assert found == quiet
        assert reasons[0][0].startswith("rank 1")
        if options.get("min_workers") or action == "raise":
            # Those who were left ended their body, and took no step before the third was there.
            assert [workers for _, workers in reasons] == [2, 3]
    assert set(tmp_path.glob("hit/fault-*"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ps"])
def test_so_it_is_where_one_evaluates_before_its_batches_and_another_has_yet_to_come_there(
    strategy: str, tmp_path: Path, quiet: Any
) -> None:
    options = {"peer_snapshots": 1, "snapshot_every": 1} if strategy == "fsdp" else {}
    hit: Faults = [("loop", 4, 1, "kill")]
    for found, _ in launch(tmp_path / "hit", hit, 0, "before", strategy=strategy, **options):
        assert found[0] == quiet[0]
        assert found[1][1:] == quiet[1][:-1]  # each is what the step before it came to
    assert set(tmp_path.glob("hit/fault-*"))


@pytest.mark.parametrize("options", [{"strategy": "fsdp"}, {"strategy": "ddp", "shard_optimizer": True}])
def test_so_it_is_where_the_one_that_is_left_has_the_whole_state(
    options: dict[str, Any], tmp_path: Path, quiet: Any
) -> None:
    """What the body began with was of parameters in parts: they are not put back into an optimizer of whole ones."""
    hit: Faults = [("loop", 4, 1, "kill")]
    for found, _ in launch(tmp_path / "hit", hit, None, "before", workers=2, save_every=1, **options):
        assert found[0] == quiet[0]
        assert found[1][1:] == quiet[1][:-1]
    assert set(tmp_path.glob("hit/fault-*"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("action", ["kill", "raise"])
def test_so_it_is_where_one_is_lost_as_soon_as_another_has_joined(
    strategy: str, action: str, tmp_path: Path, quiet: Any
) -> None:
    options = {"peer_snapshots": 1, "snapshot_every": 3} if strategy == "fsdp" else {}
    hit: Faults = [("batch", 4, 1, action), ("batch", 5, 0, action), ("batch", 7, 2, action)]
    for found, _ in launch(tmp_path / "hit", hit, 1, strategy=strategy, min_workers=3, **options):
        assert found == quiet


@pytest.mark.parametrize("slow", [None, 0, 1])
def test_so_it_is_where_workers_join(slow: int | None, tmp_path: Path, quiet: Any) -> None:
    for found, reasons in launch(tmp_path / "more", [("loop", 2, 0, "to 4")], slow):
        assert found == quiet
        assert reasons[-1] == ("a worker joins", 4)


def test_so_it_is_where_those_in_the_body_are_lost_while_the_next_group_agrees(
    tmp_path: Path, quiet: Any
) -> None:
    """What was said in a group that came to nothing is not kept: whoever is left takes the step with those who join."""
    hit: Faults = [("late", 3, 0, "to 4 and wait"), ("agreeing", 3, 1, "kill"), ("agreeing", 3, 2, "kill")]
    for found, _ in launch(tmp_path / "hit", hit, 0, strategy="fsdp"):
        assert found == quiet
    assert len(set(tmp_path.glob("hit/fault-*"))) == 3


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, sparse=True)
        self.dense = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        rows = (features[:, 0].abs() * 7).long() % 20
        return self.dense(features + self.table(rows))  # type: ignore[no-any-return]


def hash_in_odd_steps(run: paceline.Run, folder: str, faults: Faults, slow: int | None) -> Any:
    late, points = run.world.rank == slow, cycle(["connecting", "agreeing"])
    model, _ = run.prepare(Tables, lambda made: torch.optim.SGD(made.parameters(), lr=0.05))
    hashes = run.register("hashes", {"odd": []})
    fault_points.set_fault(
        lambda name: set_off(run, folder, faults, next(points) if name == fault_points.REGROUP else name)
    )
    for step in run.steps(Samples(), batch_size=BATCH, steps=7):
        for features, labels in step:
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
        if late:
            time.sleep(0.05)
        step.apply()
        if step.number % 2:
            hashes["odd"].append(run.weights_sha256())
        set_off(run, folder, faults, "end")
    fault_points.set_fault(None)
    return run.weights_sha256(), hashes["odd"]


def test_so_it_is_where_one_is_a_step_behind_the_body_that_another_is_in_and_all_go_back(
    tmp_path: Path,
) -> None:
    """It ends its own body first, to no effect, and then goes through that one."""

    def launched(name: str, faults: Faults, **options: Any) -> Any:
        (tmp_path / name).mkdir()
        chosen = {"shards": 6, "threads": 1, "device": "cpu", "out": tmp_path / name / "run", **options}
        return paceline.launch(hash_in_odd_steps, str(tmp_path / name), faults, 2, **chosen)

    (alone,) = launched("one", [], strategy="single", workers=1)
    hit: Faults = [("end", 5, 1, "kill"), ("agreeing", 5, 0, "kill")]
    for found in launched("hit", hit, strategy="hybrid", workers=3, hang_timeout=4):
        assert found == alone
    assert len(set(tmp_path.glob("hit/fault-*"))) == 2

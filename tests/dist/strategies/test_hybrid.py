"""--strategy hybrid: sparse tables on servers, the rest under ddp. The bits are one process's, and only touched rows travel."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import weights_sha256
from paceline.errors import InputError, WorkerFailedError
from paceline.remote.session import current
from paceline.strategies.hybrid.tables import check
from paceline.world import fault_points

STEPS = 9
ROWS = 600
TABLES = ("people.weight", "tags.weight")


class Model(nn.Module):
    """Two tables, one of bags, before dense layers; in both a row of padding."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.people = nn.Embedding(rows, 5, padding_idx=3, sparse=True)
        self.tags = nn.EmbeddingBag(37, 4, mode="mean", padding_idx=0, sparse=True)
        self.dense = nn.Sequential(nn.Linear(14, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh())
        self.last = nn.Linear(8, 1)

    def forward(self, people: Tensor, tags: Tensor) -> Tensor:
        # A table may be asked more than once in a pass.
        seen = [self.people(people), self.people(people.flip(0)), self.tags(tags)]
        return self.last(self.dense(torch.cat(seen, dim=1))).squeeze(1)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    tables = [value for name, value in model.named_parameters() if name in TABLES]
    others = [value for name, value in model.named_parameters() if name not in TABLES]
    return torch.optim.Adagrad([{"params": others, "lr": 0.05}, {"params": tables, "lr": 0.2}])


def scheduler(made: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LinearLR(made, 0.2, 1.0, total_iters=5)


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    people = torch.randint(12, (63,), generator=draw) * (ROWS // 12)
    people[::9] = 3
    return TensorDataset(people, torch.randint(37, (63, 3), generator=draw), (people % 7).float() / 7)


def loss(model: nn.Module, batch: list[Tensor]) -> paceline.Loss:
    weights = 1.0 + batch[2]
    return paceline.Loss(
        (F.mse_loss(model(*batch[:2]), batch[2], reduction="none") * weights).sum(), weights.sum()
    )


def measure(model: nn.Module, batch: list[Tensor]) -> dict[str, paceline.Mean]:
    return {"error": paceline.Mean(loss(model, batch).total, 1)}


def train(
    run: paceline.Run, steps: int = STEPS, killed: str | None = None, point: str = "", rank: int = 1
) -> dict[str, Any]:
    """Train; one rank dies once at a point of step 6, where `killed` names the file that says so."""

    def trap(reached: str) -> None:
        if reached == point and run.world.rank == rank and run._engine.state.position.number == 6:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(str(killed), os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)

    run._engine.preparation.prepare_replica(Model, optimizer, scheduler)
    fault_points.set_fault(trap if killed is not None else None)
    losses, measured = [], []
    for step in run.steps(data(), batch_size=13, steps=steps, max_grad_norm=0.3):
        losses.append(step.compute(loss).loss)
        if step.number == 4 and not step.again:
            measured.append(run.evaluate(data(), measure, batch_size=13))
    fault_points.set_fault(None)
    held, state = run._engine.state.replica.local_state(), run._engine.state.replica.state()
    slots = {
        f"{name}/{slot}": value
        for name, entry in state["optimizer"]["state"].items()
        for slot, value in entry.items()
    }
    return {
        "weights": weights_sha256(state["model"]),
        "optimizer": weights_sha256(dict(sorted(slots.items()))),
        "schedule": state["scheduler"]["last_epoch"],
        "groups": state["optimizer"]["groups"],
        "held": {key: chunk.bounds.numel for key, chunk in held.chunks.items() if key.startswith("model/")},
        "losses": losses,
        "measured": measured,
        "samples": run._engine.journal.samples,
        "recoveries": run._engine.state.recoveries,
        "workers": run.world.size,
    }


def launch(strategy: str, workers: int, *args: Any, function: Any = train, **options: Any) -> tuple[Any, ...]:
    launched = {"shards": 5, "threads": 1, "device": "cpu", **options}
    return paceline.launch(function, *args, strategy=strategy, workers=workers, **launched)


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """One process's answer."""
    return launch("single", 1)[0]  # type: ignore[no-any-return]


def test_the_bits_are_one_process(one: dict[str, Any]) -> None:
    trainers, servers = 3, 2
    results = launch("hybrid", trainers, servers=servers)
    assert len(results) == trainers + servers
    for result in results:
        for key in ("weights", "optimizer", "schedule", "groups", "losses", "measured"):
            assert result[key] == one[key], key
    tables = {f"model/{name}" for name in TABLES}
    assert all(result["held"].keys() == one["held"].keys() - tables for result in results[:trainers])
    assert all(result["held"].keys() == tables for result in results[trainers:])
    for table in tables:
        assert sum(result["held"][table] for result in results[trainers:]) == one["held"][table]


@pytest.mark.parametrize(("strategy", "workers"), [("dp", 2), ("ddp", 3)])
def test_rows_are_added_to_the_bit_without_servers_too(
    one: dict[str, Any], strategy: str, workers: int
) -> None:
    for result in launch(strategy, workers):
        assert result["weights"] == one["weights"]
        assert result["losses"] == one["losses"]


def count(run: paceline.Run, rows: int) -> Any:
    """Train in a loop of one's own, with a large table, and give the bytes that travelled."""
    torch.manual_seed(3)
    made = Model(rows)
    model, _ = run.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
    for step in run.steps(data(), batch_size=13, steps=4):
        for people, tags, target in step:
            step.backward(F.mse_loss(model(people, tags), target, reduction="sum"), len(target))
        step.apply()
    servers = getattr(run._engine.state.replica.placement, "servers", None)
    traffic = None if servers is None else servers.traffic
    return None if traffic is None else (
        traffic.looked_up,
        traffic.pushed,
        traffic.dense,
    ), run.weights_sha256()


def test_only_touched_rows_travel() -> None:
    ((_, expected),) = launch("single", 1, 100 * ROWS, function=count)
    results = launch("hybrid", 2, 100 * ROWS, function=count)
    assert {weights for _, weights in results} == {expected}
    assert results[2][0] is None, "trainers count"
    for (looked_up, pushed, dense), _ in results[:2]:
        assert 0 < pushed < looked_up
        assert looked_up + pushed < dense / 1000


def wait_for_a_slow_server(run: paceline.Run) -> tuple[str, list[Any]]:
    """Train with a session whose own time-out is far shorter than what the loop of a server takes between two steps."""
    torch.manual_seed(3)
    made = Model()
    model, _ = run.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
    if run.world.mesh.servers:
        current().timeout_s = 0.5
    for step in run.steps(data(), batch_size=13, steps=2):
        if run.world.serves:
            time.sleep(1.5)
        for people, tags, target in step:
            step.backward(F.mse_loss(model(people, tags), target, reduction="sum"), len(target))
        step.apply()
    return run.weights_sha256(), run._engine.state.recoveries


def test_a_slow_server_is_waited_for() -> None:
    (expected,) = launch("single", 1, function=wait_for_a_slow_server)
    assert launch("hybrid", 2, function=wait_for_a_slow_server) == (expected,) * 3


def test_a_checkpoint_moves_to_servers_and_back(one: dict[str, Any], tmp_path: Path) -> None:
    launch("single", 1, 3, out=tmp_path)
    launch("hybrid", 2, 6, out=tmp_path, resume=True)
    (result,) = launch("single", 1, out=tmp_path, resume=True)
    for key in ("weights", "optimizer", "schedule"):
        assert result[key] == one[key], key


@pytest.mark.parametrize("point", ["reduction", "optimizer"])
def test_a_lost_trainer_changes_nothing(one: dict[str, Any], point: str, tmp_path: Path) -> None:
    results = launch("hybrid", 2, STEPS, str(tmp_path / "killed"), point, servers=2, max_restarts=0)
    assert (tmp_path / "killed").exists()
    assert {result["weights"] for result in results if result} == {one["weights"]}
    found = next(result for result in results if result)
    assert found["workers"] == 3, "a trainer and two servers are left"
    assert [recovery["source"] for recovery in found["recoveries"]] == ["workers"]
    assert found["recoveries"][0]["redone"] == 0
    assert found["samples"] == one["samples"]


def test_a_lost_server_comes_back_from_the_last_checkpoint(one: dict[str, Any], tmp_path: Path) -> None:
    results = launch(
        "hybrid", 2, STEPS, str(tmp_path / "killed"), "optimizer", 2, out=tmp_path / "run", save_every="4"
    )
    assert (tmp_path / "killed").exists()
    assert {result["weights"] for result in results if result} == {one["weights"]}


def spoil(run: paceline.Run) -> None:
    run._engine.preparation.prepare_replica(Model, optimizer)
    for step in run.steps(data(), batch_size=13, steps=3):
        step.compute(lambda model, batch: paceline.Loss(loss(model, batch).total * float("nan"), 1))


def test_a_loss_that_is_no_number_names_its_samples() -> None:
    with pytest.raises(WorkerFailedError, match=r"step 0: the loss is nan\. It comes from shard 0, samples"):
        launch("hybrid", 2, function=spoil)


def tied() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Embedding(5, 2, sparse=True), "b": nn.Embedding(5, 2, sparse=True)})
    model["b"].weight = model["a"].weight
    return model


class Own(nn.Embedding):
    pass


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1)), "the model has none. Use --strategy ddp"),
        (nn.Sequential(nn.Embedding(5, 2, sparse=True, max_norm=1.0)), "0 has max_norm"),
        (nn.Sequential(Own(5, 2, sparse=True)), "0 is a Own"),
        (tied(), "a.weight and b.weight are one table"),
    ],
)
def test_a_model_that_servers_cannot_serve_is_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(InputError, match=says):
        check(model)


def train_table(run: paceline.Run) -> str:
    """Train a model that is a table itself."""
    torch.manual_seed(5)
    model, _ = run.prepare(
        lambda: nn.Embedding(11, 3, sparse=True), lambda made: torch.optim.SGD(made.parameters(), lr=0.3)
    )
    for step in run.steps(torch.utils.data.TensorDataset(torch.arange(22) % 11), batch_size=7, epochs=2):
        for (rows,) in step:
            step.backward(model(rows).pow(2).sum(1))
        step.apply()
    return run.weights_sha256()


def test_a_model_that_is_a_table_itself() -> None:
    (alone,) = launch("single", 1, function=train_table)
    assert set(launch("hybrid", 2, function=train_table, servers=2)) == {alone}

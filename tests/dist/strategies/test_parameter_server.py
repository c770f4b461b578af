"""--strategy ps: parameters on servers. Together the bits are one process's; alone each trainer is ahead by what was allowed."""

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
from paceline import strategies
from paceline.checkpoint import weights_sha256
from paceline.data.shards import owned_shards
from paceline.launch.actions import Assign, Break
from paceline.launch.failures import WorkerFailure
from paceline.launch.membership import Membership
from paceline.launch.policy import Policy
from paceline.recovery.membership import STEP, Standing
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from paceline.world import fault_points
from paceline.world.mesh import DATA

STEPS = 9


def make() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)
    )


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [value for value in model.parameters() if value.dim() > 1]
    others = [value for value in model.parameters() if value.dim() == 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01
    )


def scheduler(made: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LinearLR(made, 0.2, 1.0, total_iters=5)


def data() -> TensorDataset:
    features = torch.randn(63, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(features, features[:, :3].argmax(1))


def loss(model: nn.Module, batch: list[Tensor]) -> paceline.Loss:
    """Weigh samples unequally, with a term beside the main one."""
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    weights = 1.0 + batch[1]
    size = sum(value.square().sum() for value in model.parameters())
    return paceline.Loss((each * weights).sum(), weights.sum(), {"size": paceline.Loss(1e-3 * size, 1)})


def train(
    run: paceline.Run, steps: int = STEPS, killed: str | None = None, point: str = "", rank: int = 1
) -> dict[str, Any]:
    """Train; one rank dies once at a point of step 6, where `killed` names the file that says so."""

    def trap(reached: str) -> None:
        if reached == point and run.world.rank == rank and run._engine.state.position.number == 6:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(str(killed), os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)

    run._engine.preparation.prepare_replica(make, optimizer, scheduler)
    fault_points.set_fault(trap if killed is not None else None)
    taken = [step.compute(loss) for step in run.steps(data(), batch_size=13, steps=steps, max_grad_norm=0.05)]
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
        "held": sorted(held.chunks),
        "losses": [result.loss for result in taken if not result.again],
        "samples": run._engine.journal.samples,
        "recoveries": run._engine.state.recoveries,
        "workers": run.world.size,
    }


def launch(strategy: str, workers: int, *args: Any, **options: Any) -> tuple[Any, ...]:
    launched = {"shards": 5, "threads": 1, "device": "cpu", **options}
    return paceline.launch(train, *args, strategy=strategy, workers=workers, **launched)


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """One process's answer."""
    return launch("single", 1)[0]  # type: ignore[no-any-return]


def test_servers_stand_behind_the_trainers_and_are_dealt_no_data() -> None:
    asked = strategies.choice("ddp=2,servers=2")
    mesh = asked.fitted(4)
    assert (mesh.workers, mesh.trainers, str(mesh)) == (4, 2, "ddp=2,servers=2")
    assert [mesh.serves(rank) for rank in range(4)] == [False, False, True, True]
    owned = [owned_shards(mesh.index(rank, *DATA), mesh.size(*DATA), 5) for rank in range(4)]
    assert owned == [range(2), range(2, 5), range(5, 5), range(5, 5)]
    assert [mesh.members(rank, "ddp") for rank in (0, 3)] == [[0, 1], [2, 3]]
    # Those that are left: servers stay as long as there is anybody beside them.
    assert [str(asked.fitted(left)) for left in (3, 2, 1)] == [
        "ddp=1,servers=2",
        "ddp=1,servers=1",
        "ddp=1",
    ]


def test_who_joins_does_not_take_the_place_of_a_server() -> None:
    membership = Membership(
        Policy(workers=3, shards=2, choice=strategies.choice("ps").pinned(2)), lambda: 0.0
    )
    for number in range(3):
        membership.add(number, rank=number)
        membership.began(number)
    membership.lost(0, WorkerFailure(rank=0, host="here", kind="signal", message="gone"))
    membership.add(3, rank=None)
    for number in (1, 2):
        actions = membership.broken(number, Standing(operation=4, kind=STEP, step=4))
    assert [(one.member, one.rank) for one in actions if isinstance(one, Assign)] == [(1, 0), (2, 1)]
    membership.ready(3)
    for number in (1, 2):
        actions = membership.broken(number, Standing(operation=5, kind=STEP, step=5))
    placed = [(one.member, one.rank) for one in actions if isinstance(one, Assign)]
    assert placed == [(1, 0), (3, 1), (2, 2)], "worker 2 is the server still"


def test_a_lost_server_is_replaced_on_the_machine_that_leads() -> None:
    membership = Membership(
        Policy(workers=4, shards=4, choice=strategies.choice("ddp=3,servers=1")), lambda: 0.0
    )
    for number, host in enumerate((0, 1, 1, 0)):
        membership.add(number, rank=number, host=host)
        membership.began(number)
    membership.lost(3, WorkerFailure(rank=3, host="here", kind="signal", message="gone"))
    membership.add(4, rank=None, host=0)
    for number in (0, 1, 2):
        actions = membership.broken(number, Standing(operation=4, kind=STEP, step=4))
    placed = {one.rank: one.member for one in actions if isinstance(one, Assign)}
    assert placed == {0: 1, 1: 2, 2: 0}, "the only one on the machine that leads serves"
    membership.ready(4)
    for number in (0, 1, 2):
        actions = membership.broken(number, Standing(operation=5, kind=STEP, step=5))
    placed = {one.rank: one.member for one in actions if isinstance(one, Assign)}
    assert placed == {0: 4, 1: 1, 2: 2, 3: 0}, "and goes on serving"


def test_who_leaves_is_no_server_and_servers_do_not_count_as_workers() -> None:
    choice = strategies.choice("ddp=3,servers=2")
    membership = Membership(Policy(workers=5, shards=4, choice=choice, min_workers=2), lambda: 0.0)
    for number in range(5):
        membership.add(number, rank=number)
        membership.began(number)
    told = [one for one in membership.resize(4) if isinstance(one, Break)]
    assert [one.member for one in told if one.leaving] == [2]
    for number in range(5):
        actions = membership.broken(number, Standing(operation=4, kind=STEP, step=4))
    assert [(one.member, one.rank) for one in actions if isinstance(one, Assign)] == [
        (0, 0),
        (1, 1),
        (3, 2),
        (4, 3),
    ]
    membership.lost(0, WorkerFailure(rank=0, host="here", kind="signal", message="gone"))
    for number in (1, 3, 4):
        actions = membership.broken(number, Standing(operation=5, kind=STEP, step=5))
    assert not [one for one in actions if isinstance(one, Assign)], "one trainer is fewer than two"


def test_together_the_bits_are_one_process(one: dict[str, Any]) -> None:
    results = launch("ps", 2, servers=2)
    assert len(results) == 4
    for result in results:
        for key in ("weights", "optimizer", "schedule", "losses"):
            assert result[key] == one[key], key
    assert all(result["held"] == [] for result in results[:2]), "trainers hold nothing"
    assert sorted(key for result in results for key in result["held"]) == one["held"], (
        "everything is held once"
    )
    assert all(result["held"] for result in results[2:])


@pytest.mark.parametrize(("first", "then"), [("ps", "ddp"), ("ddp", "ps")])
def test_a_checkpoint_goes_on_under_another_strategy(
    one: dict[str, Any], first: str, then: str, tmp_path: Path
) -> None:
    launch(first, 2, 4, out=tmp_path)
    results = launch(then, 2, out=tmp_path, resume=True)
    assert {result["weights"] for result in results} == {one["weights"]}
    assert {result["optimizer"] for result in results} == {one["optimizer"]}


# Before its gradients have gone out; and behind the servers' update, which the other trainer has yet to hear of.
@pytest.mark.parametrize("point", ["reduction", "optimizer"])
def test_a_lost_trainer_changes_nothing(one: dict[str, Any], point: str, tmp_path: Path) -> None:
    results = launch("ps", 2, STEPS, str(tmp_path / "killed"), point, max_restarts=0)
    assert (tmp_path / "killed").exists()
    assert {result["weights"] for result in results if result} == {one["weights"]}
    found = next(result for result in results if result)
    assert found["workers"] == 2, "a trainer and a server are left"
    assert [recovery["source"] for recovery in found["recoveries"]] == ["workers"]
    assert found["recoveries"][0]["redone"] == 0
    assert found["samples"] == one["samples"]


def test_a_lost_server_comes_back_from_the_last_checkpoint(one: dict[str, Any], tmp_path: Path) -> None:
    results = launch(
        "ps", 2, STEPS, str(tmp_path / "killed"), "optimizer", 2, out=tmp_path / "run", save_every="4"
    )
    assert (tmp_path / "killed").exists()
    assert {result["weights"] for result in results if result} == {one["weights"]}


# Each for itself.

AHEAD, SLOW, TAKEN = 2, 1, 12
"""How far a trainer may be ahead, which rank is slow, and how many steps are taken."""


def race(run: paceline.Run, log: str) -> int:
    """Train with one slow worker; each writes down when it begins a step. Gives how many updates a server made."""
    run._engine.preparation.prepare_replica(make, optimizer, scheduler)

    def noted(model: nn.Module, batch: list[Tensor]) -> paceline.Loss:
        line = f"{run.world.rank} {run._engine.state.position.number}\n"
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)
        time.sleep(0.05 * (run.world.rank == SLOW))
        return loss(model, batch)

    for step in run.steps(data(), batch_size=13, steps=TAKEN):
        step.compute(noted)
    return getattr(run._engine.state.replica.update, "updates", 0)


def test_a_trainer_is_ahead_of_the_slowest_by_what_was_allowed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    results = paceline.launch(
        race,
        str(log),
        strategy="ps",
        workers=3,
        servers=2,
        threads=1,
        device="cpu",
        tuning={"staleness": AHEAD},
    )
    begun = dict.fromkeys(range(3), 0)
    leads = []
    for rank, number in (map(int, line.split()) for line in log.read_text().splitlines()):
        begun[rank] = number + 1
        # Whoever begins step n has taken n steps; the slowest has begun at least those that it has taken.
        leads.append(number - min(begun.values()))
    assert set(begun.values()) == {TAKEN}
    assert max(leads) <= AHEAD, "nobody is further ahead than it may be"
    assert max(leads) >= 1, "nobody waits for the slowest in every step"
    assert all(TAKEN <= updates <= 3 * TAKEN for updates in results[3:])


def digits(run: paceline.Run) -> dict[str, Any]:
    return trainer.main(run, TrainSpec(task="paceline.tasks.digits:Digits", name="digits", epochs=6))


def test_digits_reaches_its_accuracy() -> None:
    results = paceline.launch(
        digits, strategy="ps", workers=2, shards=2, threads=1, device="cpu", tuning={"staleness": 2}
    )
    assert results[0]["metrics"]["accuracy"] >= 0.95
    assert results[0]["exactness"] == "statistical"
    assert results[0]["workers"] == 2


def drift(run: paceline.Run, flag: str) -> float:
    """Every sample moves the weight alike, so that it counts the gradients that it was updated with."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    made, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for step in run.steps(TensorDataset(torch.ones(60, 1)), batch_size=12, steps=TAKEN):
        if run.world.rank == SLOW and run.world.mesh.trainers > 1:
            time.sleep(0.05)
        for (ones,) in step:
            step.backward(made(ones).squeeze(1))
            if run.world.rank == SLOW and step.number == 4 and not Path(flag).exists():
                Path(flag).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        step.apply()
    run.weights_sha256()
    return float(model.weight.detach())


@pytest.mark.parametrize("killed", [False, True])
def test_what_was_pushed_before_a_worker_was_lost_counts_once(killed: bool, tmp_path: Path) -> None:
    """Those that were ahead of the one that is lost go back, and push the same shards once more."""
    flag = tmp_path / "killed"
    if not killed:
        flag.touch()
    results = paceline.launch(
        drift,
        str(flag),
        strategy="ps",
        workers=3,
        shards=6,
        servers=1,
        threads=1,
        device="cpu",
        tuning={"staleness": AHEAD},
    )
    assert flag.exists()
    assert results[-1] == pytest.approx(-TAKEN, rel=1e-5)


def test_a_worker_lost_without_waiting_is_survived(tmp_path: Path) -> None:
    results = launch(
        "ps", 2, 3 * STEPS, str(tmp_path / "killed"), "reduction", max_restarts=0, tuning={"staleness": 2}
    )
    assert (tmp_path / "killed").exists()
    (left,) = {result["weights"] for result in results if result}
    assert left
    assert {result["schedule"] for result in results if result} == {3 * STEPS}
    assert {result["samples"] for result in results if result} == {5 * 63 + 2 * 13}, "each step counts once"


class Unhurried(torch.optim.SGD):
    """Updates one parameter, and the next one a while later."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad
                time.sleep(0.1)


def pull_during_updates(run: paceline.Run) -> list[list[float]]:
    """Return both weights of a server, which every gradient moves alike, as one trainer finds them while the other trains."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    made, _ = run.prepare(model, Unhurried(model.parameters(), lr=0.1))
    found: list[list[float]] = []
    for step in run.steps(TensorDataset(torch.ones(24, 1)), batch_size=12, steps=3):
        placement: Any = run._engine.state.replica.placement
        if run.world.rank == 0:
            time.sleep(0.3)
        until = time.monotonic() + 3
        # In the first step all meet once, so that nobody is ahead.
        while (
            run.world.rank == SLOW
            and step.number == 1
            and found[:1] == found[-1:]
            and time.monotonic() < until
        ):
            ((held, _),) = placement.servers.wait([one.future() for one in placement._pull])
            found.append([float(one) for one in held.values()])
        for (ones,) in step:
            step.backward(made(ones).squeeze(1))
        step.apply()
    return found


def test_a_pull_is_answered_with_no_half_of_an_update() -> None:
    results = paceline.launch(
        pull_during_updates, strategy="ps", workers=2, threads=1, device="cpu", tuning={"staleness": AHEAD}
    )
    assert results[SLOW]
    assert all(first == second for first, second in results[SLOW])


# What does not fit.


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("ps", {"tuning": {"staleness": -1}}, "staleness is -1, but must be at least 0"),
        ("ps", {"servers": 0}, "servers is 0, but must be at least 1"),
        ("ddp", {"servers": 1}, "servers is an option of ps"),
        ("ps", {"exact": "bitwise", "tuning": {"staleness": 1}}, "exact='bitwise' is more than"),
        ("ps", {"sync_batchnorm": True}, "sync_batchnorm=True needs the workers to meet in the middle"),
    ],
)
def test_what_does_not_fit_is_refused(strategy: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(paceline.InputError, match=words):
        launch(strategy, 2, **options)

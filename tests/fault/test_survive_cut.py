"""Workers die, leave and join while each holds only a part of the state: where it comes from then, and the same bits."""

import json
import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.errors import InputError
from paceline.launch import api
from paceline.launch.control import order
from paceline.strategies.tuning import Tuning
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec
from paceline.verify.receipts.audit import audit
from paceline.world import fault_points
from tests.fault.survivors import BATCH, Samples, mean_output, once, set_off

STEPS = 16


def model():
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        nn.Linear(8, 3),
    )


def loss(model, batch):
    return paceline.Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


def adam_w(made):
    return torch.optim.AdamW(made.parameters(), lr=0.05)


def momentum_of_weights(made):
    """Keep something of some parameters and nothing of the others."""
    weights = [one for one in made.parameters() if one.dim() > 1]
    others = [one for one in made.parameters() if one.dim() == 1]
    return torch.optim.SGD([{"params": weights, "momentum": 0.9}, {"params": others}], lr=0.05)


class Fading(torch.optim.lr_scheduler.LRScheduler):
    """Keeps its state in a tensor that it writes to in place."""

    def __init__(self, optimizer):
        self.level = torch.ones(1)
        super().__init__(optimizer)

    def get_lr(self):
        self.level.mul_(0.75)
        return [rate * float(self.level) for rate in self.base_lrs]


def inverse(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train(run, folder, faults=(), optimizer=adam_w, scheduler=inverse):
    """Train with a model that each group makes anew; faults are set off as in survivors.py."""
    run._engine.preparation.prepare_replica(model, optimizer, scheduler=scheduler)
    history = run.register("history", {"losses": []})
    fault_points.set_fault(lambda point: set_off(run, folder, faults, point))
    given = []
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS, max_grad_norm=1.0):
        given.append(step.number)
        set_off(run, folder, faults, "loop")
        result = step.compute(loss)
        if not result.again:
            history["losses"].append(result.loss)
        if step.number == 11 and not step.again:
            run.evaluate(Samples(), mean_output)
    fault_points.set_fault(None)
    assert len(history["losses"]) == STEPS, history["losses"]
    return {
        "weights": run.weights_sha256(),
        "given": given,
        "size": run.world.size,
        "losses": history["losses"],
    }


def run(folder, faults, workers, strategy, **options):
    options = {"shards": 6, "device": "cpu", "out": folder / "run", "threads": 1, **options}
    return paceline.launch(train, str(folder), faults, workers=workers, strategy=strategy, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of one process that nothing happened to."""
    (result,) = run(tmp_path_factory.mktemp("quiet"), (), 1, "single")
    losses.extend(result["losses"])
    return result["weights"]


losses = []
"""What a loop notes of its steps, where nothing happens."""


def changes(folder):
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "regrouped"]


def test_a_replica_in_a_hybrid_mesh_hands_its_part_on(tmp_path, undisturbed):
    results = run(tmp_path, [("backward", 5, 3, "kill")], 4, "ddp=2,fsdp=2")
    assert {result["weights"] for result in results} == {undisturbed}
    first = changes(tmp_path)[0]
    assert (first["source"], first["redone"], first["workers"], first["step"]) == ("workers", 0, 3, 5)
    assert all(result["losses"] == losses for result in results)


@pytest.fixture(scope="module")
def undisturbed_momentum(tmp_path_factory):
    options = {"shards": 6, "device": "cpu", "threads": 1}
    return paceline.launch(train, "", (), momentum_of_weights, strategy="single", **options)[0]["weights"]


@pytest.mark.parametrize(
    ("workers", "strategy", "source"),
    [(4, "ddp=2,fsdp=2", "workers"), (2, "fsdp", "copies"), (2, "pp", "copies")],
)
def test_slots_of_some_parameters_alone_are_whole(workers, strategy, source, tmp_path, undisturbed_momentum):
    options = {"shards": 6, "device": "cpu", "out": tmp_path / "run", "threads": 1, "max_restarts": 0}
    options |= {"peer_snapshots": 1, "snapshot_every": 4} if source == "copies" else {}
    faults = [("backward", 5, 1, "kill")]
    results = paceline.launch(
        train, str(tmp_path), faults, momentum_of_weights, workers=workers, strategy=strategy, **options
    )
    assert {result["weights"] for result in results if result} == {undisturbed_momentum}
    redone = 1 if source == "copies" else 0  # before the first step there are no slots at all
    assert [(change["source"], change["redone"]) for change in changes(tmp_path)] == [(source, redone)]


@pytest.mark.parametrize("strategy", ["fsdp", "pp"])
def test_a_copy_in_a_neighbours_memory_fills_in(strategy, tmp_path, undisturbed):
    results = run(
        tmp_path, [("forward", 6, 1, "kill")], 2, strategy, peer_snapshots=1, snapshot_every=4, max_restarts=0
    )
    assert [result["weights"] for result in results] == [undisturbed]
    (change,) = changes(tmp_path)
    assert (change["source"], change["redone"], change["step"]) == ("copies", 2, 4)
    assert audit(tmp_path / "run").holds
    assert results[0]["given"] == [*range(7), *range(4, STEPS)]
    assert all(result["losses"] == losses for result in results)


@pytest.mark.parametrize("strategy", ["fsdp", "pp"])
def test_a_copy_holds_the_schedule_as_it_was_then(strategy, tmp_path):
    options = {"shards": 6, "device": "cpu", "threads": 1}
    quiet = paceline.launch(train, "", (), adam_w, Fading, strategy="single", **options)[0]["weights"]
    options |= {"strategy": strategy, "workers": 3, "out": tmp_path / "run", "max_restarts": 0}
    options |= {"peer_snapshots": 1, "snapshot_every": 4}
    faults = [("forward", 6, 2, "kill"), ("forward", 7, 1, "kill")]
    found = paceline.launch(train, str(tmp_path), faults, adam_w, Fading, **options)
    assert {result["weights"] for result in found if result} == {quiet}
    assert {change["source"] for change in changes(tmp_path)} == {"copies"}


def test_without_copies_the_last_checkpoint_does(tmp_path, undisturbed):
    results = run(tmp_path, [("forward", 7, 0, "kill")], 3, "fsdp", save_every="5")
    assert {result["weights"] for result in results} == {undisturbed}
    first = changes(tmp_path)[0]
    assert (first["source"], first["redone"], first["step"]) == ("checkpoint", 2, 5)
    assert audit(tmp_path / "run").holds
    assert all(result["losses"] == losses for result in results)


def test_without_anything_the_state_is_made_anew(tmp_path, undisturbed):
    tuning = Tuning(shard_optimizer=True)
    results = run(tmp_path, [("reduction", 3, 1, "kill")], 3, "ddp", tuning=tuning)
    assert {result["weights"] for result in results} == {undisturbed}
    first = changes(tmp_path)[0]
    assert (first["source"], first["redone"], first["step"]) == ("beginning", 3, 0)
    assert all(result["losses"] == losses for result in results)


def test_kills_one_after_the_other_and_in_the_regroup(tmp_path, undisturbed):
    faults = [("backward", 4, 2, "kill"), ("regroup", 4, 0, "kill"), ("backward", 9, 1, "kill")]
    results = run(tmp_path, faults, 3, "fsdp", peer_snapshots=1, snapshot_every=2)
    assert {result["weights"] for result in results} == {undisturbed}


@pytest.mark.parametrize("step", [6, 7])
def test_one_that_replaces_a_failed_worker_takes_snapshots_with_the_others(step, tmp_path, undisturbed):
    faults = [("forward", step, 2, "raise")]
    results = run(tmp_path, faults, 3, "fsdp", peer_snapshots=1, snapshot_every=2)
    assert {result["weights"] for result in results} == {undisturbed}
    (change,) = changes(tmp_path)
    assert change["source"] == "copies"
    assert all(result["losses"] == losses for result in results)


def test_whoever_leaves_puts_its_part_down_for_the_others(tmp_path, undisturbed):
    faults = [("loop", 4, 0, "to 1"), ("loop", 8, 0, "to 3")]
    results = run(tmp_path, faults, 3, "fsdp")
    assert {result["weights"] for result in results} == {undisturbed}
    assert [change["redone"] for change in changes(tmp_path)] == [0] * len(changes(tmp_path))
    assert not list((tmp_path / "run").glob(".left-by-*"))


def grow(run):
    """Train alone until another one has joined, and a little with it."""
    run._engine.preparation.prepare_replica(model, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    together = 0
    for step in run.steps(Samples(), batch_size=BATCH, steps=1000):
        if step.number == 2 and not step.again:
            order(run._engine.state.options.out, {"do": "resize", "workers": 2})
        time.sleep(0.1 * (run.world.size == 1 and step.number > 2))
        step.compute(loss)
        together += run.world.size == 2
        if together == 3:
            break
    return run.world.size


def test_one_that_held_everything_shares_it_with_those_that_join(tmp_path):
    sizes = paceline.launch(grow, strategy="fsdp", shards=6, device="cpu", out=tmp_path / "run", threads=1)
    assert list(sizes) == [2, 2]
    assert [(change["source"], change["redone"]) for change in changes(tmp_path)] == [("workers", 0)]


def ready_made(run, folder, faults):
    """Train a model that exists once: it is without values when it has been sharded and its group is gone."""
    run._engine.preparation.prepare_replica(
        model(), lambda made: torch.optim.AdamW(made.parameters(), lr=0.05)
    )
    fault_points.set_fault(lambda point: set_off(run, folder, faults, point))
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS):
        step.compute(loss)


def test_a_beginning_that_cannot_be_made_again_ends_the_run(tmp_path):
    options = {"workers": 2, "strategy": "fsdp", "shards": 4, "device": "cpu", "threads": 1}
    with pytest.raises(InputError, match=r"ready made\. Give run\.prepare functions"):
        paceline.launch(ready_made, str(tmp_path), [("backward", 3, 1, "kill")], **options)


class Measured(paceline.Task):
    """Loses a worker in the middle of its measurement, if it is given a folder to remember that in."""

    batch_size, epochs = BATCH, 1

    def __init__(self, folder: str = ""):
        self.folder = folder

    def model(self):
        return model()

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    def train_data(self):
        return Samples()

    eval_data = train_data

    def loss(self, model, batch):
        return loss(model, batch)

    def metrics(self, model, batch):
        if self.folder and once(self.folder, "lost"):
            os.kill(os.getpid(), signal.SIGKILL)
        return mean_output(model, batch)


def test_what_was_measured_before_the_run_went_back_is_measured_again(tmp_path):
    def measured(strategy, workers, folder):
        spec = TrainSpec(task=f"{__name__}:Measured", name="measured", settings={"folder": folder})
        options = RunOptions(strategy=strategy, workers=workers, shards=4, device="cpu")
        return api.start(api.TRAINER, (spec,), {}, options, threads=1).results[0]

    alone, rough = measured("single", 1, ""), measured("fsdp", 2, str(tmp_path))
    assert [change["source"] for change in rough["recoveries"]][:1] == ["beginning"]
    assert rough["metrics"] == alone["metrics"]
    assert rough["weights_sha256"] == alone["weights_sha256"]


@pytest.mark.parametrize("strategy", ["ddp=2,pp=2", "pp=4"])
def test_workers_that_share_a_replica_wait_for_the_one_that_is_lost(strategy, tmp_path, undisturbed):
    results = run(tmp_path, [("forward", 5, 1, "kill")], 4, strategy, peer_snapshots=1, snapshot_every=2)
    assert [result["weights"] for result in results] == [undisturbed] * 4
    assert [change["workers"] for change in changes(tmp_path)] == [4]


def test_where_nobody_replaces_it_a_whole_replica_goes_on(tmp_path, undisturbed):
    results = run(tmp_path, [("forward", 5, 0, "kill")], 4, "ddp=2,pp=2", max_restarts=0)
    assert [result["weights"] for result in results] == [undisturbed] * 2
    assert [(change["workers"], change["source"]) for change in changes(tmp_path)] == [(2, "workers")]
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    notes = [event["text"] for event in map(json.loads, lines) if event["kind"] == "note"]
    assert any("2 go on as pp=2,ddp=1, and 1 of them end" in text for text in notes), notes

"""Workers die, leave and join while each holds only a part of the state: where it comes from then, and the same bits."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.strategies.tuning import Tuning
from paceline.world import points
from tests.fault.survivors import BATCH, Samples, mean_output, set_off

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


def train(run, folder, faults=()):
    """Train with a model that each group makes anew; faults are set off as in survivors.py."""
    run.prepare_replica(
        model,
        lambda made: torch.optim.AdamW(made.parameters(), lr=0.05),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    )
    points.set_trap(lambda point: set_off(run, folder, faults, point))
    given = []
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS, clip=1.0):
        given.append(step.number)
        set_off(run, folder, faults, "loop")
        step.compute(loss)
        if step.number == 11 and not step.again:
            run.evaluate(Samples(), mean_output)
    points.set_trap(None)
    return {"weights": run.weights_sha256(), "given": given, "size": run.world.size}


def run(folder, faults, workers, strategy, **options):
    options = {"shards": 6, "device": "cpu", "out": folder / "run", "threads": 1, **options}
    return paceline.launch(train, str(folder), faults, workers=workers, strategy=strategy, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of one process that nothing happened to."""
    (result,) = run(tmp_path_factory.mktemp("quiet"), (), 1, "single")
    return result["weights"]


def changes(folder):
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "regrouped"]


def test_a_replica_in_a_hybrid_mesh_hands_its_part_on(tmp_path, undisturbed):
    results = run(tmp_path, [("backward", 5, 3, "kill")], 4, "ddp=2,fsdp=2")
    assert {result["weights"] for result in results} == {undisturbed}
    first = changes(tmp_path)[0]
    assert (first["source"], first["redone"], first["workers"], first["step"]) == ("workers", 0, 3, 5)


@pytest.mark.parametrize("strategy", ["fsdp", "pp"])
def test_a_copy_in_a_neighbours_memory_fills_in(strategy, tmp_path, undisturbed):
    results = run(
        tmp_path, [("forward", 6, 1, "kill")], 2, strategy, peer_copies=1, copy_every=4, max_restarts=0
    )
    assert [result["weights"] for result in results] == [undisturbed]
    (change,) = changes(tmp_path)
    assert (change["source"], change["redone"], change["step"]) == ("copies", 2, 4)
    assert results[0]["given"] == [*range(7), *range(4, STEPS)]


def test_without_copies_the_last_checkpoint_does(tmp_path, undisturbed):
    results = run(tmp_path, [("forward", 7, 0, "kill")], 3, "fsdp", save_every="5")
    assert {result["weights"] for result in results} == {undisturbed}
    first = changes(tmp_path)[0]
    assert (first["source"], first["redone"], first["step"]) == ("checkpoint", 2, 5)


def test_without_anything_the_state_is_made_anew(tmp_path, undisturbed):
    tuning = Tuning(shard_optimizer=True)
    results = run(tmp_path, [("reduction", 3, 1, "kill")], 3, "ddp", tuning=tuning)
    assert {result["weights"] for result in results} == {undisturbed}
    first = changes(tmp_path)[0]
    assert (first["source"], first["redone"], first["step"]) == ("beginning", 3, 0)


def test_kills_one_after_the_other_and_in_the_regroup(tmp_path, undisturbed):
    faults = [("backward", 4, 2, "kill"), ("regroup", 4, 0, "kill"), ("backward", 9, 1, "kill")]
    results = run(tmp_path, faults, 3, "fsdp", peer_copies=1, copy_every=2)
    assert {result["weights"] for result in results} == {undisturbed}


def test_whoever_leaves_puts_its_part_down_for_the_others(tmp_path, undisturbed):
    faults = [("loop", 4, 0, "to 1"), ("loop", 8, 0, "to 3")]
    results = run(tmp_path, faults, 3, "fsdp")
    assert {result["weights"] for result in results} == {undisturbed}
    assert [change["redone"] for change in changes(tmp_path)] == [0] * len(changes(tmp_path))
    assert not list((tmp_path / "run").glob(".left-by-*"))

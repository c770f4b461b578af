"""A group whose state is sharded shrinks and grows: only what a worker lacks in the new cut is sent, and the bits stay."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.state.chunks import rows_of
from paceline.strategies.tuning import Tuning
from paceline.world import fault_points
from tests.fault.survivors import BATCH, Samples, set_off

STEPS = 10


def model():
    return nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))


def loss(model, batch):
    return paceline.Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


def train(run, folder, faults):
    """Train, and note what this worker holds of the state in each of its groups."""
    run._engine.preparation.prepare_replica(model, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    fault_points.set_fault(lambda point: set_off(run, folder, faults, point))
    held = {}
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS):
        set_off(run, folder, faults, "loop")
        step.compute(loss)
        groups = len(run._engine.state.recoveries)
        held[groups] = rows_of(run._engine.state.replica.local_state().chunks)
    fault_points.set_fault(None)
    return {"weights": run.weights_sha256(), "held": list(held.values())}


def launched(folder, faults, workers, strategy, **options):
    fixed = {"shards": 6, "device": "cpu", "out": folder / "run", "threads": 1}
    return paceline.launch(train, str(folder), faults, workers=workers, strategy=strategy, **fixed, **options)


def moves(folder):
    """Return for each change of the group how many workers there were, and the bytes that went between them."""
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["kind"] == "regrouped"]
    return [(event["workers"], event["moved_bytes"]) for event in events]


def places(rows, key, shape):
    """Return the places of a tensor that a worker holds."""
    mark = torch.zeros(shape, dtype=torch.bool)
    if key in rows:
        rows[key][1].of(mark).fill_(True)
    return mark


def least(before, after):
    """Return the bytes that two cuts imply: what each has after and had not before, but others had.

    Whoever left has put its part down in the run folder, where everybody reads it.
    """
    total = 0
    for key, meta in {key: row[0] for rows in after for key, row in rows.items()}.items():
        somebody = torch.stack([places(rows, key, meta.shape) for rows in before]).any(0)
        for own, new in zip(before, after, strict=True):
            lacks = places(new, key, meta.shape) & ~places(own, key, meta.shape) & somebody
            total += int(lacks.sum()) * meta.dtype.itemsize
    return total


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of one process that nothing happened to."""
    (result,) = launched(tmp_path_factory.mktemp("quiet"), (), 1, "single")
    return result["weights"]


@pytest.mark.parametrize(
    ("strategy", "workers", "change", "options"),
    [
        ("fsdp", 4, "to 3", {}),
        ("fsdp", 3, "to 4 and wait", {}),
        ("pp", 4, "to 3", {}),
        ("ddp", 3, "to 4 and wait", {"tuning": Tuning(shard_optimizer=True)}),
    ],
)
def test_a_regroup_moves_what_the_cuts_imply_and_no_more(
    strategy, workers, change, options, tmp_path, undisturbed
):
    results = launched(tmp_path, [("loop", 4, 0, change)], workers, strategy, **options)
    assert {result["weights"] for result in results} == {undisturbed}
    assert len(results) == (3 if workers == 4 else 4)
    ((size, moved),) = moves(tmp_path)
    assert size == len(results)
    after = [result["held"][-1] for result in results]
    before = [result["held"][0] if len(result["held"]) == 2 else {} for result in results]
    assert moved == least(before, after)
    state = {key: row[0].size for rows in after for key, row in rows.items()}
    assert 0 < moved < sum(state.values())  # all of it went to all of them

"""What a loop has set once on its modules, behind some step, is so in a worker that joins later and in modules made anew."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.errors import InputError
from tests.fault.survivors import BATCH, Samples, set_off

STEPS = 12


class Net(nn.Module):
    """A model with settings that are in no tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.act, self.head = nn.Tanh(), nn.Linear(8, 3)
        self.scale, self.powers, self.rank, self.mine = 1.0, (1, 2), -1, -1

    def forward(self, features):
        hidden = self.drop(self.act(self.norm(self.a(features))))
        return self.head(hidden) * self.scale ** self.powers[0]


def train(run, folder, faults, change):
    """Train in a loop that changes its model once, behind step 2."""
    model, _ = run.prepare(Net, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    model.rank = run.world.rank
    size = run.world.size
    for step in run.steps(Samples(), batch_size=BATCH, steps=STEPS, max_grad_norm=1.0):
        set_off(run, folder, faults, "loop")
        for features, labels in step:
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
        step.apply()
        if faults and step.number > 4 and run.world.size < size:
            time.sleep(0.25)
        if step.number == 2 and not step.again:
            change(model, run)
    return run.weights_sha256(), run.world.size, model.rank, model.mine, model.scale


def settings(model, run):
    model.scale, model.powers, model.drop.p, model.mine = 0.5, (2, 2), 0.4, run.world.rank
    model.norm.eval()
    model.new = "set behind a step"


def layer(model, _):
    model.act = nn.ReLU()


def launch(folder, faults, workers, strategy, change, **options):
    folder.mkdir()
    options = {"shards": 4, "device": "cpu", "out": folder / "run", "threads": 1, **options}
    return paceline.launch(train, str(folder), faults, change, workers=workers, strategy=strategy, **options)


@pytest.mark.parametrize(
    ("strategy", "workers", "options"),
    [("ddp", 2, {}), ("ddp", 3, {}), ("fsdp", 2, {"peer_snapshots": 1, "snapshot_every": 1}), ("ps", 2, {})],
)
def test_settings_are_handed_to_a_worker_that_joins(tmp_path, strategy, workers, options):
    (one,) = launch(tmp_path / "quiet", (), 1, "single", settings)
    results = launch(
        tmp_path / "cut", [("loop", 4, 1, "kill")], workers, strategy, settings, save_every=4, **options
    )
    assert {result[0] for result in results} == {one[0]}
    assert {result[1] for result in results} == {workers + (strategy == "ps")}
    if workers == 3:
        # What each set by its rank (0 before it joins) stays its own, and what the others differ in is nobody else's.
        assert sorted(result[2:4] for result in results) == [(0, -1), (0, 0), (2, 2)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_another_layer_is_refused(tmp_path, strategy):
    options = {"peer_snapshots": 1, "snapshot_every": 1} if strategy == "fsdp" else {}
    with pytest.raises(InputError, match=r"^act was replaced in the run and is a ReLU by now, but .* a Tanh"):
        launch(tmp_path / "cut", [("loop", 4, 1, "kill")], 2, strategy, layer, **options)

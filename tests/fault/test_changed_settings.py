"""What a loop has set once on its modules, behind some step, is so in a worker that joins later and in modules made anew."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.errors import InputError
from paceline.verify.receipts.rerun import SegmentReplay, verify_receipt
from tests.fault.survivors import BATCH, Samples, set_off

STEPS = 12


class Net(nn.Module):
    """A model with settings that are in no tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.act, self.head = nn.Tanh(), nn.Linear(8, 3)
        self.scale, self.powers, self.rank, self.mine = 1.0, (1, 2), -1, -1
        self.table, self.factors, self.active, self.after = {"factor": {"of": 1.0}}, [1.0], {"a", "b"}, None
        self.also = self.table

    def forward(self, features):
        hidden = self.drop(self.act(self.norm(self.a(features))))
        made = self.head(hidden) * self.scale ** self.powers[0] * self.also["factor"]["of"]
        made = made * self.factors[-1] * len(self.active)
        return made if self.after is None else self.after(made)


def halve(made):
    """Do what a loop decides to do from some step on."""
    return made * 0.5


def train(run, folder, faults, change, behind):
    """Train in a loop that changes its model once, behind a step."""
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
        if step.number == behind and not step.again:
            change(model, run)
    return run.weights_sha256(), run.world.size, model.rank, model.mine, model.scale


def settings(model, run):
    model.scale, model.powers, model.drop.p, model.mine = 0.5, (2, 2), 0.4, run.world.rank
    model.norm.eval()
    model.new = "set behind a step"


def tables(model, _):
    model.table["factor"]["of"] = 0.5
    model.factors.append(0.75)
    model.active |= {"c", "d"}
    model.after = halve


def builtin(model, _):
    model.after = torch.tanh


def closure(model, _):
    model.after = lambda made: made * 0.5


def patch(model, _):
    model.head.forward = lambda hidden: F.linear(hidden, model.head.weight * 0.5, model.head.bias)


def hook(model, _):
    model.a.register_forward_hook(lambda *given: given[-1] * 0.5)


def layer(model, _):
    model.act = nn.ReLU()


def launch(folder, faults, workers, strategy, change, behind=2, **options):
    folder.mkdir()
    options = {"shards": 4, "device": "cpu", "out": folder / "run", "threads": 1, **options}
    return paceline.launch(
        train, str(folder), faults, change, behind, workers=workers, strategy=strategy, **options
    )


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


@pytest.mark.parametrize("change", [tables, builtin])
def test_so_are_tables_and_functions(tmp_path, change):
    (one,) = launch(tmp_path / "quiet", (), 1, "single", change)
    results = launch(tmp_path / "cut", [("loop", 4, 1, "kill")], 2, "ddp", change)
    assert {result[0] for result in results} == {one[0]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (closure, r"^after of the model was set in the run to .*closure.*lambda.*, but .* with None"),
        (patch, r"^forward of head was set in the run to .*patch.*lambda.*, but .* without it"),
        (hook, r"^a was given other hooks in the run \(by now forward_hook .*hook.*\), but .* with none"),
    ],
)
def test_what_no_other_process_can_look_up_is_refused(tmp_path, change, said):
    with pytest.raises(InputError, match=said):
        launch(tmp_path / "cut", [("loop", 4, 1, "kill")], 2, "ddp", change)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_another_layer_is_refused(tmp_path, strategy):
    options = {"peer_snapshots": 1, "snapshot_every": 1} if strategy == "fsdp" else {}
    with pytest.raises(InputError, match=r"^act was replaced in the run and is a ReLU by now, but .* a Tanh"):
        launch(tmp_path / "cut", [("loop", 4, 1, "kill")], 2, strategy, layer, **options)


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (2, {"peer_snapshots": 1, "snapshot_every": 4}),
        (3, {"peer_snapshots": 1, "snapshot_every": 4}),
        (2, {"save_every": 4}),
        (2, {"save_every": 20}),
    ],
    ids=["copies of two", "copies of three", "a checkpoint", "the beginning"],
)
@pytest.mark.parametrize("change", [settings, tables])
def test_a_run_that_goes_back_has_the_settings_of_that_step(tmp_path, change, workers, options):
    (one,) = launch(tmp_path / "quiet", (), 1, "single", change, behind=5)
    results = launch(tmp_path / "cut", [("loop", 7, 1, "kill")], workers, "fsdp", change, behind=5, **options)
    assert {result[0] for result in results} == {one[0]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            hook,
            r"^a was given other hooks in the run \(by now .*\), but the run goes back to step 4, where it had none",
        ),
        (layer, r"^act was replaced in the run and is a ReLU by now, but"),
    ],
)
def test_what_cannot_be_taken_back_is_refused(tmp_path, change, said):
    options = {"peer_snapshots": 1, "snapshot_every": 4}
    with pytest.raises(InputError, match=said):
        launch(tmp_path / "cut", [("loop", 7, 1, "kill")], 2, "fsdp", change, behind=5, **options)


def resumable(run, steps, change):
    """Train to a step in a loop that changes its model once, behind the third step."""
    model, _ = run.prepare(Net, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    for step in run.steps(Samples(), batch_size=BATCH, steps=steps):
        for features, labels in step:
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
        step.apply()
        if step.number == 2:
            change(model, run)
    return run.weights_sha256()


@pytest.mark.parametrize(("change", "other"), [(settings, "fsdp"), (tables, "dp"), (builtin, "ps")])
def test_a_run_that_is_resumed_has_the_settings_of_its_checkpoint(tmp_path, change, other):
    options = {"shards": 4, "device": "cpu", "threads": 1}
    (whole,) = paceline.launch(resumable, STEPS, change, workers=1, **options)
    paceline.launch(resumable, 6, change, workers=2, out=tmp_path, **options)
    more = {"out": tmp_path, "resume": True, **options}
    paceline.launch(resumable, 8, change, workers=2, strategy=other, **more)
    assert set(paceline.launch(resumable, STEPS, change, workers=1, **more)) == {whole}


def test_a_resume_without_what_cannot_be_saved_is_told_of(tmp_path):
    options = {"workers": 2, "shards": 4, "device": "cpu", "threads": 1, "out": tmp_path}
    paceline.launch(resumable, 4, closure, **options)
    paceline.launch(resumable, STEPS, closure, resume=True, **options)
    told = (tmp_path / "events.jsonl").read_text()
    assert told.count("after of the model was set in the run to what no checkpoint holds") == 1


def two_calls(run, flag):
    """Change a setting in the first of two calls of `run.steps`; a worker is killed between them."""
    model, _ = run.prepare(Net, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    for call in range(2):
        for step in run.steps(Samples(), batch_size=BATCH, steps=6):
            for features, labels in step:
                step.backward(F.cross_entropy(model(features), labels, reduction="none"))
            step.apply()
            if step.number == 2:
                settings(model, run)
        if call == 0 and flag and run.world.rank == 1 and not Path(flag).exists():
            Path(flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return run.weights_sha256()


def test_so_has_a_run_that_starts_over(tmp_path):
    options = {"shards": 4, "device": "cpu", "threads": 1}
    (whole,) = paceline.launch(two_calls, "", workers=1, **options)
    cut = {"workers": 2, "strategy": "fsdp", "save_every": 4, "out": tmp_path / "run", **options}
    assert set(paceline.launch(two_calls, str(tmp_path / "flag"), **cut)) == {whole}
    assert (tmp_path / "flag").exists()


class Switched(paceline.Task):
    """A task whose hook freezes a norm and raises a dropout after the first epoch."""

    batch_size, shards, epochs, rate = BATCH, 4, 3, 1.0

    def model(self):
        self.net = Net()
        return self.net

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    def train_data(self):
        return Samples()

    def loss(self, model, batch):
        return paceline.Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none") * self.rate)

    def on_epoch(self, info):
        if info.epoch == 0:
            self.net.norm.eval()
            self.net.drop.p = 0.4


class Annealed(Switched):
    """One with a rate that follows the steps, too."""

    def on_step(self, info):
        self.rate *= 0.9


@pytest.mark.parametrize("kind", [Switched, Annealed])
def test_so_has_a_task_and_a_rerun_of_its_receipt(tmp_path, kind):
    options = {"workers": 1, "device": "cpu"}
    task = f"{__file__}:{kind.__name__}"
    whole = paceline.train(task, out=tmp_path / "whole", **options)
    middle, out = whole.steps // 2 + 1, tmp_path / "run"
    paceline.train(task, steps=middle, out=out, **options)
    rest = paceline.resume(out, steps=whole.steps, workers=2, strategy="fsdp", device="cpu")
    assert rest.weights_sha256 == whole.weights_sha256
    if kind is Switched:  # a re-run calls no hooks
        assert verify_receipt(SegmentReplay(folder=out, start=middle, strategy="ddp", workers=2)).holds

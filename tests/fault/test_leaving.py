"""A loop that is left before its end: all leave it alike, behind a step that was taken, whoever is lost at that moment."""

import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.errors import InputError
from tests.fault.survivors import BATCH, Samples, mean_output, once

LEFT, LAST = 3, 5


def train(run, folder, dies="", careful=True, apart=False):
    """Leave the loop at a step, measure, and train on; a worker dies in that step or behind it."""
    model, _ = run.prepare(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        lambda made: torch.optim.SGD(made.parameters(), lr=0.1),
    )
    for step in run.steps(Samples(), batch_size=BATCH, steps=LAST + 1):
        die(run, folder, dies == "inside" and step.number == LEFT)
        take(step, model)
        if apart and step.number == LAST and run.world.rank:
            break
        if not apart and step.number == LEFT and not (careful and step.again):
            break
    die(run, folder, dies == "behind")
    measured = run.evaluate(Samples(), mean_output)["mean"] if dies != "between" else 0.0
    die(run, folder, dies == "between")
    for step in run.steps(Samples(), batch_size=BATCH, steps=2):
        take(step, model)
    return run.weights_sha256(), run._engine.state.position.number, measured


def take(step, model):
    for features, labels in step:
        step.backward(F.cross_entropy(model(features), labels, reduction="none"))
    step.apply()


def die(run, folder, now):
    if now and run.world.rank == 1 and once(folder, "died"):
        os.kill(os.getpid(), signal.SIGKILL)


def launch(folder, *how, workers=3, strategy="ddp", **options):
    folder.mkdir(exist_ok=True)
    options = {"shards": 6, "threads": 1, "device": "cpu", "out": folder / "run", **options}
    return paceline.launch(train, str(folder), *how, workers=workers, strategy=strategy, **options)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("quiet"), workers=1, strategy="single")[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_worker_killed_when_the_loop_was_left_changes_nothing(strategy, tmp_path, quiet):
    """Where a part of the state went with it, the run goes back behind what the function has left: it starts over."""
    assert set(launch(tmp_path / "behind", "behind", strategy=strategy, save_every="2")) == {quiet}
    between = launch(tmp_path / "between", "between", strategy=strategy, save_every="2")
    assert {(weights, steps) for weights, steps, _ in between} == {quiet[:2]}


def lose_two(run, folder):
    """Lose a worker in a step, and another behind the loop, while one has heard all and one is kept from hearing them."""
    model, _ = run.prepare(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        lambda made: torch.optim.SGD(made.parameters(), lr=0.1),
    )
    for step in run.steps(Samples(), batch_size=BATCH, steps=LEFT + 1):
        die(run, folder, run._engine.state.options.workers > 1 and step.number == 1)
        take(step, model)
        if step.number == LEFT:
            run.save()  # so that none is due behind the loop, where all would hear of all
    if run.world.size > 1:
        time.sleep((0, 2.0, 0.5)[run.world.rank])
        if run.world.rank == 2 and once(folder, "died behind"):
            os.kill(os.getpid(), signal.SIGKILL)
    measured = run.evaluate(Samples(), mean_output)["mean"]
    for step in run.steps(Samples(), batch_size=BATCH, steps=2):
        take(step, model)
    return run.weights_sha256(), run._engine.state.position.number, measured


def test_a_second_worker_killed_while_some_have_heard_where_all_left(tmp_path):
    options = {"shards": 6, "threads": 1, "device": "cpu", "hang_timeout": 10}
    (quiet,) = paceline.launch(
        lose_two, str(tmp_path), workers=1, strategy="single", out=tmp_path / "one", **options
    )
    found = paceline.launch(
        lose_two, str(tmp_path), workers=4, strategy="ddp", max_restarts=0, out=tmp_path / "run", **options
    )
    assert {"died", "died behind"} <= {path.name for path in tmp_path.iterdir()}
    assert set(found) == {quiet}


def test_a_loop_left_at_a_step_that_is_to_be_taken_once_more(tmp_path, quiet):
    assert set(launch(tmp_path / "careful", "inside")) == {quiet}
    with pytest.raises(InputError, match=r"left at step 3, in which a worker was lost: .*not step\.again"):
        launch(tmp_path / "careless", "inside", False)


def test_some_leave_with_break_where_others_come_to_the_end(tmp_path):
    with pytest.raises(InputError, match=r"with break after its last step, where rank . came to the end"):
        launch(tmp_path / "apart", "", True, True)

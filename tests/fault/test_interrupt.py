"""Ctrl-C: the first one ends the run behind a step, with a checkpoint; what is resumed has the bits of a whole run."""

import os
import signal
import time

import pytest
import torch

import paceline
from paceline.training.folder import newest_step
from paceline.verify.receipts.audit import audit
from tests.checkpoints import Checkpoints
from tests.fault import survivors
from tests.fault.test_survive_cut import STEPS, loss, model, run
from tests.patience import HANG_S

PRESSED = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of one process that nothing happened to."""
    (result,) = run(tmp_path_factory.mktemp("quiet"), (), 1, "single")
    return result["weights"]


def launcher_of(folder):
    return int((folder / "launcher").read_text())


def interrupted(folder, workers, strategy, faults=(("forward", PRESSED, 0, "ctrl-c"),), **options):
    (folder / "launcher").write_text(str(os.getpid()))
    with pytest.raises(KeyboardInterrupt):
        run(folder, list(faults), workers, strategy, **options)
    return newest_step(folder / "run")


@pytest.mark.parametrize(
    ("strategy", "workers", "resumed"),
    [
        ("ddp", 3, "fsdp"),
        ("fsdp", 2, "ddp"),
        ("pp", 2, "pp"),
        ("ps", 2, "ps"),
        ("single", 1, "dp"),
        ("dp", 2, "single"),
    ],
)
def test_the_first_ends_the_run_behind_a_step_that_all_have_finished(
    strategy,
    workers,
    resumed,
    tmp_path,
    whole,
    capfd,
):
    step = interrupted(tmp_path, workers, strategy)
    assert PRESSED <= step < STEPS
    said = capfd.readouterr().err
    assert "interrupted: finishing the step and saving a checkpoint. Ctrl-C again leaves at once" in said
    assert "Traceback" not in said
    others = 1 if resumed == "single" else 2
    results = run(tmp_path, (), others, resumed, resume=True)
    assert {result["weights"] for result in results} == {whole}
    assert results[0]["given"][0] == step
    assert audit(tmp_path / "run").holds


def test_an_order_to_stop_ends_the_run_as_sigterm_does(tmp_path, whole, capfd):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, [("forward", PRESSED, 0, "order to stop")], 2, "ddp")
    assert ended.value.code == 143
    assert "SIGTERM: finishing the step and saving a checkpoint" in capfd.readouterr().err
    assert PRESSED <= newest_step(tmp_path / "run") < STEPS
    assert {result["weights"] for result in run(tmp_path, (), 2, "ddp", resume=True)} == {whole}


def test_before_the_first_step_is_finished_nothing_is_said_of_a_checkpoint_that_may_not_come(tmp_path, capfd):
    assert interrupted(tmp_path, 1, "single", [("forward", 0, 0, "ctrl-c")]) == 1
    said = capfd.readouterr().err
    assert (
        "interrupted: no step has been finished yet. Ending before the first, with nothing to save, or"
        in said
    )
    assert "finishing the step" not in said


def test_a_checkpoint_that_is_due_anyway_is_not_written_twice_and_a_kill_in_it_is_survived(
    tmp_path,
    whole,
):
    faults = [("loop", PRESSED, 0, "ctrl-c"), ("checkpoint", PRESSED, 1, "kill")]
    step = interrupted(tmp_path, 3, "ddp", faults, save_async=True, save_every="2")
    assert PRESSED <= step < STEPS
    results = run(tmp_path, (), 3, "ddp", resume=True)
    assert {result["weights"] for result in results} == {whole}


def stall(run, folder):
    """Take steps that never end from some point on; the second Ctrl-C follows the first."""
    run._engine.preparation.prepare_replica(model, lambda made: torch.optim.SGD(made.parameters(), lr=0.1))
    for step in run.steps(survivors.Samples(), batch_size=survivors.BATCH, steps=STEPS):
        if step.number == 3 and run.world.rank == 0:
            os.kill(launcher_of(folder), signal.SIGINT)
            time.sleep(1.0)
            os.kill(launcher_of(folder), signal.SIGINT)
        if step.number == 3:
            time.sleep(600)
        step.compute(loss)


def test_the_second_leaves_at_once_whatever_the_step_is_at(tmp_path):
    (tmp_path / "launcher").write_text(str(os.getpid()))
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        paceline.launch(stall, tmp_path, workers=2, threads=1, device="cpu", out=tmp_path / "run")
    assert time.monotonic() - before < HANG_S
    assert not Checkpoints(tmp_path / "run" / "checkpoints").committed()


@pytest.mark.parametrize("options", [{"out": None}, {"elastic": False}])
def test_where_nothing_can_be_saved_the_first_leaves_at_once(options, tmp_path, capfd):
    (tmp_path / "launcher").write_text(str(os.getpid()))
    options = {"out": tmp_path / "run", **options}
    with pytest.raises(KeyboardInterrupt):
        paceline.launch(press_and_wait, tmp_path, workers=2, threads=1, device="cpu", **options)
    told = "interrupted: leaving at once, without a checkpoint: with --no-elastic" in capfd.readouterr().err
    assert told is (options["out"] is not None)


def press_and_wait(run, folder):
    """Press Ctrl-C in a step that does not end."""
    run._engine.preparation.prepare_replica(model, lambda made: torch.optim.SGD(made.parameters(), lr=0.1))
    for step in run.steps(survivors.Samples(), batch_size=survivors.BATCH, steps=STEPS):
        if step.number == 1 and run.world.rank == 0:
            os.kill(launcher_of(folder), signal.SIGINT)
        if step.number == 1:
            time.sleep(600)
        step.compute(loss)

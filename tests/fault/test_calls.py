"""A worker that joins late runs the loop from its top: it takes over what was found between calls and changed on the way."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.errors import InputError, WorkerFailedError
from tests.fault.survivors import BATCH, Samples, mean_output, set_off
from tests.patience import HANG_S

FIRST, SECOND, THIRD = 3, 3, 12


def make():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def await_newcomer(run):
    """Hold a step back until the one that is missing wants to join."""
    limit = time.monotonic() + HANG_S
    while not run._engine.recovery.membership.change_wanted and time.monotonic() < limit:
        time.sleep(0.02)


def train(run, folder, faults=()):
    """Train, measure, train with what was found, measure, train again."""
    model, optimizer = run.prepare(make, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    found = []
    for call, steps in enumerate((FIRST, SECOND, THIRD)):
        for step in run.steps(Samples(), batch_size=BATCH, steps=steps):
            set_off(run, folder, faults, f"call {call}")
            if faults and run.world.size < run._engine.state.workers:
                await_newcomer(run)
            for features, labels in step:
                step.backward(F.cross_entropy(model(features), labels, reduction="none"))
            step.apply()
            if call == 1 and step.number == FIRST and not step.again:
                run.evaluate(Samples(), mean_output)
            if call and step.number == FIRST + SECOND - 2:
                break
        found += [run.evaluate(Samples(), mean_output)["mean"], run.weights_sha256()]
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + abs(found[-2])) if call == 0 else 0.5 * group["lr"]
        run.save()  # also by a worker that has gone by the calls before, and is in step with the others again
    return found, run.world.size, len(run._engine.state.recoveries)


def launch(folder, faults, workers, strategy, **options):
    folder.mkdir(exist_ok=True)
    options = {"shards": 4, "device": "cpu", "out": folder / "run", "threads": 1, **options}
    return paceline.launch(train, str(folder), faults, workers=workers, strategy=strategy, **options)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_worker_is_replaced_in_a_later_call_with_measurements_in_between(strategy, tmp_path):
    ((quiet, _, _),) = launch(tmp_path / "quiet", (), 1, "single")
    faults = [("call 2", FIRST + SECOND + 1, 1, "kill"), ("call 2", FIRST + SECOND + 5, 0, "kill")]
    results = launch(tmp_path / strategy, faults, 2, strategy, peer_snapshots=int(strategy == "fsdp"))
    assert [found for found, _, _ in results] == [quiet, quiet]
    assert [(size, recoveries >= 4) for _, size, recoveries in results] == [(2, True)] * 2


def grow(run, folder, faults=(), steps=9, part="old"):
    """Have a part of the model train from the third step on, in a group of its own; a `new` part was not there before."""
    model = make()
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.05)
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(Samples(), batch_size=BATCH, steps=steps):
        set_off(run, folder, faults, "loop")
        if faults and run.world.size < run._engine.state.workers:
            await_newcomer(run)
        if step.number == 2 and len(optimizer.param_groups) == 1:
            if part == "new":
                torch.manual_seed(5)
                model.append(nn.Linear(3, 3))
            optimizer.add_param_group(
                {"params": list(model[-1 if part == "new" else 0].parameters()), "lr": 0.01}
            )
        for features, labels in step:
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
        step.apply()
    return run.weights_sha256(), [group["lr"] for group in optimizer.param_groups]


def test_a_group_that_the_optimizer_was_given_on_the_way_is_resumed_and_handed_over(tmp_path):
    options = {"shards": 2, "device": "cpu", "threads": 1}
    two = {**options, "strategy": "ddp", "workers": 2}
    whole = paceline.launch(grow, None, strategy="single", **options)
    faults = [("loop", 4, 1, "kill")]
    assert paceline.launch(grow, str(tmp_path), faults, **two) == whole * 2
    run = tmp_path / "run"
    paceline.launch(grow, None, (), 5, **two, out=run)
    with pytest.raises(
        InputError, match=r"0\.weight was added to the optimizer during the run.*'single', 'dp' or 'ddp'"
    ):
        paceline.launch(grow, None, **{**two, "strategy": "fsdp"}, out=run, resume=True)
    assert paceline.launch(grow, None, **two, out=run, resume=True) == whole * 2
    (tmp_path / "fault-0-1").unlink()
    with pytest.raises(InputError, match=r"3\.weight was added to the model during the run"):
        paceline.launch(grow, str(tmp_path), faults, 9, "new", **two)


def killed_before_it_returns(run, folder):
    model, _ = run.prepare(make, lambda made: torch.optim.SGD(made.parameters(), lr=0.05))
    for step in run.steps(Samples(), batch_size=BATCH, steps=2):
        for features, labels in step:
            step.backward(F.cross_entropy(model(features), labels, reduction="none"))
        step.apply()
    found = run.weights_sha256()
    set_off(run, folder, [("the end", 0, 0, "kill")], "the end")
    return found


def test_a_worker_killed_before_it_returns_is_told_of_and_the_run_resumes(tmp_path):
    options = {"workers": 2, "strategy": "ddp", "device": "cpu", "threads": 1, "out": tmp_path / "run"}
    with pytest.raises(
        WorkerFailedError, match=r"SIGKILL where another worker has returned already.*resume=True"
    ):
        paceline.launch(killed_before_it_returns, str(tmp_path), **options)
    first, second = paceline.launch(
        killed_before_it_returns, str(tmp_path), out=tmp_path / "run", resume=True
    )
    assert first == second

"""What is reported of a step: auxiliary terms and `run.log`, the same for any number of workers, once a step."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss, Mean

DATA = TensorDataset(
    torch.randn(19, 6, generator=torch.Generator().manual_seed(3)),
    torch.randint(3, (19,), generator=torch.Generator().manual_seed(4)),
)


def die(run, step, where, mark):
    """End rank 1 in its fourth step, once."""
    if where and step.number == 3 and run.world.rank == 1 and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def report(run, dies="", mark=""):
    """Train with an auxiliary term, and report a number, a mean of sums and one of samples."""
    model, _ = run.prepare(net := nn.Linear(6, 3), torch.optim.SGD(net.parameters(), lr=0.1))
    run.log({"before": 0.5})
    for step in run.steps(DATA, batch_size=8, epochs=2):
        totals, right, count = [], 0, 0
        for x, y in step:
            die(run, step, dies == "batch", mark)
            out = model(x)
            losses = F.cross_entropy(out, y, reduction="none")
            norm = out.square().sum(1)
            step.backward(Loss(losses.sum(), len(losses), {"size": Loss(0.01 * norm.sum(), 3 * len(norm))}))
            totals.append(losses.detach())
            right, count = right + (out.argmax(1) == y).sum(), count + len(y)
        result = step.apply()
        die(run, step, dies == "applied", mark)
        per_sample = torch.cat(totals) if totals else torch.zeros(0)
        run.log({"accuracy": Mean(right, count), "loss again": Mean(per_sample, count)})
        run.log({"doubled": 2 * result.loss, "tensor": torch.tensor(step.number)})
    return run.weights_sha256()


def told(folder):
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [
        (one["step"], one["epoch"], one["loss"], one["auxiliary"]) for one in events if one["kind"] == "step"
    ]
    return steps, [(one["step"], one["values"]) for one in events if one["kind"] == "logged"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    found = paceline.launch(report, workers=1, shards=4, threads=1, out=folder)
    return found[0], *told(folder)


def test_what_one_process_reports(alone):
    _, steps, logged = alone
    assert [step for step, *_ in steps] == [1, 2, 3, 4, 5, 6]
    assert logged[0] == (0, {"before": 0.5})
    assert [step for step, _ in logged[1:]] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    for (step, _, loss, auxiliary), (_, means), (_, numbers) in zip(
        steps, logged[1::2], logged[2::2], strict=True
    ):
        assert auxiliary.keys() == {"size"}
        assert means["loss again"] + auxiliary["size"] == pytest.approx(loss)
        assert numbers == {"doubled": 2 * loss, "tensor": step - 1}
        assert 0 <= means["accuracy"] <= 1


@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 3), ("fsdp", 2), ("ps", 2)])
def test_several_workers_report_the_same_bits(alone, tmp_path, strategy, workers):
    found = paceline.launch(
        report, workers=workers, shards=4, threads=1, strategy=strategy, out=tmp_path / "run"
    )
    assert (found[0], *told(tmp_path / "run")) == alone


@pytest.mark.parametrize("dies", ["batch", "applied"])
def test_after_a_lost_worker_a_step_reports_once_and_no_mean_of_a_part(alone, tmp_path, dies):
    mark = tmp_path / "died"
    found = paceline.launch(report, dies, str(mark), workers=3, shards=4, threads=1, out=tmp_path / "run")
    assert mark.exists()
    weights, steps, logged = alone
    lost = [one for one in logged if one[0] == 4 and "accuracy" in one[1]]
    if dies == "applied":
        logged = [one for one in logged if one not in lost]
        assert "step 3: run.log reports no mean of it" in (tmp_path / "run" / "events.jsonl").read_text()
    assert (found[0], *told(tmp_path / "run")) == (weights, steps, logged)


def misuse(run, how):
    model, _ = run.prepare(net := nn.Linear(6, 3), torch.optim.SGD(net.parameters(), lr=0.1))
    if how == "early":
        run.log({"a": Mean(1, 1)})
    for step in run.steps(DATA, batch_size=8, steps=1):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="none"))
            if how == "batch":
                run.log({"a": 1.0})
        step.apply()
        if how == "names":
            run.log({f"a{run.world.rank}": Mean(1, 1)})
        if how == "text":
            run.log({"a": "b"})


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("early", "in the body of a step, behind step.apply"),
        ("batch", "Call it after step.apply"),
        ("names", "Log the same ones on all"),
        ("text", "which is no number"),
    ],
)
def test_what_would_be_a_mixture_is_refused(how, words):
    with pytest.raises(paceline.InputError, match=words):
        paceline.launch(misuse, how, workers=2, threads=1)

"""Real runs leave a ledger and a receipt that hold, and a receipt can be checked by running a segment again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline.cli import main as command_line
from paceline.errors import InputError, WorkerFailedError
from paceline.records import ledger
from paceline.records.receipt import Receipt
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from paceline.verify.receipts.audit import audit
from paceline.verify.receipts.rerun import SegmentReplay, verify_receipt

TASK = """
import os, signal
import torch
from tests.contract.tasks import Classify

class Falls(Classify):
    '''Dropout, AdamW, and a loss that ends the process at its nth call.'''

    def __init__(self, fall: int = 0, kill: bool = False, width: float = 1.0) -> None:
        super().__init__()
        self.fall, self.kill, self.calls = fall, kill, 0

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == self.fall:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("fell")
        return super().loss(model, batch)

class Scheduled(Falls):
    '''A learning rate that falls to zero over the whole run, however far it is re-run.'''

    epochs = 1

    def scheduler(self, optimizer, total_steps):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)
"""
"""61 samples in batches of 8: an epoch has eight steps, the last one of 5 samples."""


def train(
    task: Path, out: Path, *, steps: int, settings: dict[str, str] | None = None, **given: Any
) -> dict[str, Any]:
    spec = TrainSpec(
        task=f"{task}:{given.pop('kind', 'Falls')}",
        name="falls",
        steps=steps,
        settings=settings or {},
        overrides={"seed": 3},
    )
    options = {"threads": 1, "device": "cpu", "out": out, **given}
    result: dict[str, Any] = paceline.launch(trainer.main, spec, **options)[0]
    return result


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("task") / "falls.py"
    path.write_text(TASK)
    return path


@pytest.fixture(scope="module")
def run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by 2 processes, then by 4 threads, then by 3 processes, that nobody may change."""
    out = tmp_path_factory.mktemp("receipt") / "run"
    train(task, out, steps=6, workers=2, shards=4, save_every="3")
    train(task, out, steps=10, strategy="dp", workers=4, save_every=None, resume=True)
    train(task, out, steps=20, strategy="ddp", workers=3, resume=True)
    return out


def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_the_receipt_tells_what_was_run(run: Path, task: Path) -> None:
    document = json.loads((run / "receipt.json").read_text())
    facts = {
        name: document[name] for name in ("seed", "shards", "batch_size", "exactness", "threads", "finished")
    }
    assert facts == {
        "seed": 3,
        "shards": 4,
        "batch_size": 8,
        "exactness": "bitwise",
        "threads": 1,
        "finished": True,
    }
    assert [
        (start.generation, start.step, start.strategy, start.workers) for start in Receipt.read(run).history
    ] == [(0, 0, "ddp", 2), (1, 6, "dp", 4), (2, 10, "ddp", 3)]
    assert set(document["versions"]) == {"python", "torch", "numpy", "paceline"}
    assert document["versions"]["torch"] == torch.__version__
    assert document["task"] == f"{task}:Falls"
    assert str(task) in document["sources"]
    assert any(name.endswith("tests/contract/tasks.py") for name in document["sources"])
    assert (document["device"], document["precision"], document["compile"]) == ("cpu", "fp32", False)
    assert list(document["checkpoints"]) == ["3", "6", "10", "20"]


def test_hashes_and_chain_do_not_depend_on_the_workers(run: Path, task: Path, tmp_path: Path) -> None:
    whole = train(task, tmp_path / "whole", steps=20, strategy="single", shards=4, save_every="10")
    there, here = Receipt.read(run), Receipt.read(tmp_path / "whole")
    assert here.checkpoints[20].weights_sha256 == whole["weights_sha256"]
    assert here.checkpoints[20].chain is not None
    assert {step: here.checkpoints[step] for step in (10, 20)} == {
        step: there.checkpoints[step] for step in (10, 20)
    }


def test_the_ledgers_of_a_run_on_changing_workers_hold(run: Path) -> None:
    found = audit(run)
    assert found.holds, found.problems
    assert (found.steps, found.epochs, found.steps_of_next_epoch, found.samples) == (20, 2, 4, 2 * 61 + 32)
    assert list(ledger.paths(run)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2), (2, 2)]


def test_workers_that_see_the_same_samples_count_them_once(task: Path, tmp_path: Path) -> None:
    train(task, tmp_path / "run", steps=5, strategy="pp", workers=2, shards=4, save_every="2")
    found = audit(tmp_path / "run")
    assert found.holds, found.problems
    assert (found.steps, found.samples) == (5, 40)


@pytest.mark.parametrize("kill", [False, True])
def test_after_a_fall_the_steps_taken_again_count_once(task: Path, tmp_path: Path, kill: bool) -> None:
    out = tmp_path / "run"
    # Each worker has two shards: the 21st call is in the 11th step, two beyond the checkpoint.
    with pytest.raises(WorkerFailedError, match="SIGKILL" if kill else "fell|died|failed"):
        train(
            task,
            out,
            steps=20,
            workers=2,
            shards=4,
            save_every="4",
            elastic=False,
            settings={"fall": "21", "kill": str(kill)},
        )
    before = audit(out)
    assert before.holds, before.problems
    assert (before.steps, before.finished, before.beyond) == (8, False, 3)
    records = [ledger.read(path) for path in ledger.paths(out).values()]
    taken_again = sum(int((one["number"] >= 8).sum()) for one in records)
    train(task, out, steps=14, workers=3, resume=True)
    found = audit(out)
    assert found.holds, found.problems
    assert (found.steps, found.superseded) == (14, taken_again)
    with pytest.raises(InputError, match=r"resumed at step 8 with another settings .*--steps 8, or --from 8"):
        verify_receipt(SegmentReplay(folder=out, steps=14))


def test_a_worker_that_is_lost_on_the_way_costs_no_sample(task: Path, run: Path, tmp_path: Path) -> None:
    """The third of 3 has two shards, so its 15th call is in the 8th step; the others do not get that far."""
    out = tmp_path / "run"
    train(task, out, steps=10, workers=3, shards=4, save_every="3", settings={"fall": "15", "kill": "True"})
    found = audit(out)
    assert found.holds, found.problems
    assert (found.steps, found.lost, found.repeated, found.finished) == (10, 0, 0, True)
    there, here = Receipt.read(run), Receipt.read(out)
    assert here.checkpoints[10] == there.checkpoints[10]
    assert [start.step for start in here.history][:2] == [0, 7]
    assert found.superseded >= 4


def test_a_record_is_made_before_anything_of_the_step_is_computed(task: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(WorkerFailedError, match="fell"):
        train(task, out, steps=9, strategy="single", settings={"fall": "5"})
    assert ledger.read(ledger.paths(out)[ledger.Origin(0, 0)])["number"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("chosen", "steps"),
    [
        ({"strategy": "single"}, [3]),
        ({"steps": 15, "strategy": "ddp", "workers": 3}, [3, 6, 10]),
        ({"start": 6, "strategy": "dp", "workers": 2}, [10]),
        ({"start": 10, "strategy": "ddp", "workers": 1}, [20]),
    ],
)
def test_the_bits_agree_on_other_workers(run: Path, chosen: dict[str, Any], steps: list[int]) -> None:
    before = sorted(run.rglob("*"))
    found = verify_receipt(SegmentReplay(folder=run, **chosen))
    assert found.holds, found.lines()
    assert [one.step for one in found.compared] == steps
    assert all(one.samples for one in found.compared)
    assert not any(line.startswith(("device", "threads", "torch", "the task")) for line in found.differences)
    assert sorted(run.rglob("*")) == before, "a re-run has a folder of its own"


def test_a_schedule_is_laid_out_as_it_was_for_the_whole_run(task: Path, tmp_path: Path) -> None:
    train(task, tmp_path / "run", kind="Scheduled", steps=12, strategy="single", shards=2, save_every="3")
    assert Receipt.read(tmp_path / "run").last.horizon == 12
    found = verify_receipt(SegmentReplay(folder=tmp_path / "run", steps=6, strategy="ddp", workers=2))
    assert found.holds, found.lines()
    assert [one.step for one in found.compared] == [3, 6]


def test_another_hash_is_no_agreement(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = copied(run, tmp_path)
    receipt = Receipt.read(out)
    receipt.saved(3, replace(receipt.checkpoints[3], weights_sha256="0" * 64)).write(out)
    assert command_line._command(["verify", "--receipt", str(out), "--workers", "1"]) == 1
    told = capsys.readouterr().out
    assert "step 3: weights DIFFER (000000000000 there" in told
    assert "samples agree" in told
    assert "NOT the same bits" in told
    receipt.saved(10, replace(receipt.checkpoints[10], weights_sha256="0" * 64)).write(out)
    with pytest.raises(
        InputError, match=r"checkpoint of step 10 .* is not the one that the receipt tells of"
    ):
        verify_receipt(SegmentReplay(folder=out, start=10, workers=1))


def test_what_is_different_here_is_named(task: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(TASK)
    out = tmp_path / "run"
    train(mine, out, steps=3, strategy="single", shards=2)
    mine.write_text(TASK.replace("super().__init__()", "super().__init__(dropout=0.1)"))
    receipt = Receipt.read(out)
    older = replace(receipt.last, versions={**receipt.last.versions, "torch": "2.9.1"})
    replace(receipt, history=(older,)).write(out)
    found = verify_receipt(SegmentReplay(folder=out, threads=2))
    assert not found.holds
    assert not found.compared[0].weights
    assert found.compared[0].samples
    told = "\n".join(found.lines())
    assert f"torch: 2.9.1 there, {torch.__version__} here" in told
    assert "threads of each worker: 1 there, 2 here" in told
    assert "the task's source has changed: mine.py" in told


def test_a_hash_that_cannot_be_met_for_no_reason_on_record_says_so(run: Path, tmp_path: Path) -> None:
    out = copied(run, tmp_path)
    receipt = Receipt.read(out)
    receipt.saved(3, replace(receipt.checkpoints[3], weights_sha256="0" * 64)).write(out)
    found = replace(verify_receipt(SegmentReplay(folder=out, strategy="single")), differences=[])
    assert found.lines()[-2].startswith("find out with: paceline verify ")


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"steps": 2}, "no hash within the first 2 steps. Use --steps 3 or more"),
        ({"steps": 3, "start": 3}, "both choose a segment"),
        ({"start": 20}, "step 20 is the last one"),
        ({"start": 4}, "no checkpoint of step 4 to begin from. There are: 6, 10, 20"),
        ({"start": 3}, "no checkpoint of step 3 to begin from. There are: 6, 10, 20"),
    ],
)
def test_a_segment_that_is_not_there(run: Path, chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        verify_receipt(SegmentReplay(folder=run, **chosen))


def test_the_command_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line._command(["audit", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["holds"], found["lost"], found["repeated"], found["steps"]) == (True, 0, 0, 20)
    call = ["verify", "--receipt", str(run), "--from", "6", "--strategy", "ddp", "--workers", "2", "--json"]
    assert command_line._command(call) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["holds"], again["first"], again["last"], again["workers"]) == (True, 6, 10, 2)
    out = copied(run, tmp_path)
    path = ledger.paths(out)[ledger.Origin(1, 2)]
    path.write_bytes(path.read_bytes()[: -ledger.RECORD.itemsize])
    assert command_line._command(["audit", str(out)]) == 1
    assert "step 19, shard 1: on no ledger" in capsys.readouterr().out
    assert command_line._command(["verify", "--receipt", str(run), "digits"]) == 2
    assert command_line._command(["audit", str(tmp_path)]) == 2


class Counting(IterableDataset[Any]):
    """A stream of 23 items that does not say how many it has."""

    def __iter__(self) -> Iterator[Any]:
        for item in range(23):
            yield torch.tensor([item / 23.0])


def own_loop(run: paceline.Run, stream: bool) -> None:
    model = nn.Linear(1, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = Counting() if stream else TensorDataset(torch.linspace(0, 1, 23).reshape(-1, 1))
    for steps in (5 if stream else 4, 8):  # twice, as a loop of one's own may; 5 steps are an epoch
        for step in run.steps(data, batch_size=5, steps=steps):
            for batch in step:
                losses = model(batch if stream else batch[0]).pow(2)
                step.backward(losses.sum(), len(losses))
            step.apply()


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_ones_own_is_audited_but_not_run_again(tmp_path: Path, stream: bool) -> None:
    paceline.launch(own_loop, stream, workers=2, shards=3, threads=1, out=tmp_path / "run", save_every="3")
    found = audit(tmp_path / "run")
    assert found.holds, found.problems
    assert found.stream is stream
    served = (found.steps, found.epochs, found.steps_of_next_epoch, found.samples)
    assert served == ((5 + 8, 2, 3, 23 + 23 + 15) if stream else (4 + 8, 1, 3, 20 + 23 + 15))
    with pytest.raises(InputError, match="was a loop of your own"):
        verify_receipt(SegmentReplay(folder=tmp_path / "run"))

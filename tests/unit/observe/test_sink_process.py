"""Sinks in a process of their own: what they write, and what happens when they fail or do not keep up."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import InputError
from paceline.observe import (
    EpochFinished,
    Evaluated,
    Logged,
    Note,
    RunFinished,
    RunStarted,
    StepFinished,
    sink_process,
)
from paceline.observe import sink_catalogue as catalogue
from paceline.training.options import RunOptions

STARTED = RunStarted("t", "ddp", 2, 4, "bitwise", "cpu", "gloo", 9, 64, 8, 3, None, 0, "runs/a")
EVENTS = [
    STARTED,
    StepFinished(1, 0, 0.5, 8, 0.5, 1e-3, 2.0, {"balance": 0.25}),
    Logged(1, 0, {"accuracy": 0.75}),
    StepFinished(2, 0, float("nan"), 8, 0.5, 1e-3),
    EpochFinished(0, 2, 0.5),
    Evaluated(2, 0, {"loss": 0.125}, 8, 0.1),
    RunFinished({"steps": 2}),
]
WANTED = {
    ("1", "train/loss", 0.5),
    ("1", "train/gradient_norm", 2.0),
    ("1", "auxiliary/balance", 0.25),
    ("1", "accuracy", 0.75),
    ("2", "epoch/loss", 0.5),
    ("2", "eval/loss", 0.125),
}


class Mine:
    """A user's own."""

    def __init__(self, folder):
        self.file = (folder / "mine.txt").open("a")

    def emit(self, event):
        self.file.write(f"{event.kind}\n")

    def close(self):
        self.file.close()


class Failing:
    def __init__(self, folder):
        print("printed by a package")

    def emit(self, event):
        if isinstance(event, StepFinished):
            raise OSError("no network\nand more")

    def close(self):
        raise AssertionError("it has failed and is not asked again")


class Dying(Failing):
    def emit(self, event):
        os._exit(3)


class Slow(Failing):
    def emit(self, event):
        time.sleep(60)


class Deaf(Failing):
    """Closes what it is told by and stays, with a process of its own beside it."""

    def __init__(self, folder):
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL
        )
        (folder / "child").write_text(str(child.pid))

    def emit(self, event):
        os.close(0)
        time.sleep(60)


OWN = "tests.unit.observe.test_sink_process:"


def fed(names, folder, events=EVENTS):
    notes = []
    sink = sink_process.SinkProcess(names, folder, notes.append)
    for event in events:
        sink.emit(event)
    sink.close()
    sink.close()
    return notes


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        return [(row["step"], row["name"], float(row["value"])) for row in csv.DictReader(file)]


def test_one_that_fails_costs_a_note_and_the_others_write_everything(tmp_path):
    pytest.importorskip("tensorboard")
    notes = fed(["csv", f"{OWN}Failing", f"{OWN}Mine", f"{OWN}NotThere", "tensorboard"], tmp_path)
    assert len(notes) == 2
    assert f"--sink {OWN}Failing failed, and the run goes on without it: OSError: no network" in notes
    assert "NotThere failed" in "".join(notes)
    assert {*rows(tmp_path)} >= WANTED
    assert ("2", "train/loss") in {row[:2] for row in rows(tmp_path) if row[2] != row[2]}
    assert (tmp_path / "mine.txt").read_text().split() == [event.kind for event in EVENTS]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert (tmp_path / "logs" / "sinks.log").read_text() == "printed by a package\n"
    assert fed(["csv"], tmp_path, EVENTS[1:2]) == []  # another process goes on with the table
    assert len([row for row in rows(tmp_path) if row[:2] == ("1", "train/loss")]) == 2


def test_a_process_that_dies_and_one_that_stands_still(tmp_path, monkeypatch):
    notes = []
    sink = sink_process.SinkProcess([f"{OWN}Dying"], tmp_path, notes.append)
    sink.emit(STARTED)
    sink._process.wait()
    sink.emit(STARTED)
    sink.emit(STARTED)
    sink.close()
    assert notes == [f"--sink {OWN}Dying: their process has ended, and the run goes on without them"]
    monkeypatch.setattr(sink_process, "PATIENCE_S", 1.0)
    monkeypatch.setattr(sink_process, "WAITING", 1000)
    slow = fed([f"{OWN}Slow"], tmp_path, [Note("x" * 100) for _ in range(2000)])
    assert [note.partition(": ")[2].partition(",")[0] for note in slow] == [
        "not done 1 s after the run",
        "did not keep up",
    ]


def test_one_that_hears_no_more_and_stays_does_not_hold_up_the_run(tmp_path):
    notes = []
    sink = sink_process.SinkProcess([f"{OWN}Deaf"], tmp_path, notes.append)
    until = time.monotonic() + 60
    while not notes and time.monotonic() < until:
        sink.emit(STARTED)
        time.sleep(0.05)
    sink.close()
    assert notes == [f"--sink {OWN}Deaf: their process has ended, and the run goes on without them"]
    assert sink._process.returncode == -signal.SIGKILL
    child = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("given", "folder", "words"),
    [
        ("csvv", Path(), "unknown --sink 'csvv'. Did you mean 'csv'"),
        ("csv", None, "--sink csv needs a folder"),
        ("no.such.module:Sink", None, "there is no module no, neither"),
        ([object()], None, "give its class"),
    ],
)
def test_what_cannot_be_a_sink_is_refused_beforehand(given, folder, words):
    with pytest.raises(InputError, match=words):
        catalogue.check(catalogue.named(RunOptions(sink=given).sink), folder)


def test_sinks_may_be_given_in_several_ways():
    assert RunOptions(sink=["csv", Mine, "csv"]).sink == f"csv,{OWN}Mine"
    assert RunOptions(sink=("wandb", "mlflow")).sink == "wandb,mlflow"
    assert RunOptions().sink is None


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="large: tried by hand, and wherever it is installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert fed(["wandb"], tmp_path) == []
    assert fed(["wandb"], tmp_path, EVENTS[3:]) == []  # rank 0 is another worker now
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    assert b"auxiliary/balance" in next(first.glob("*.wandb")).read_bytes()


def test_mlflow_in_a_local_folder(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="large: tried by hand, and wherever it is installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert fed(["mlflow"], tmp_path) == []
    assert fed(["mlflow"], tmp_path, [StepFinished(3, 0, 0.25, 8, 0.5, 1e-3)]) == []
    run = (tmp_path / "sinks" / "mlflow").read_text()
    (metrics,) = (tmp_path / "mlruns").glob(f"*/{run}/metrics")
    lines = (metrics / "train" / "loss").read_text().splitlines()
    assert [
        (float(line.split()[1]), int(line.split()[2])) for line in lines if "nan" not in line.lower()
    ] == [
        (0.5, 1),
        (0.25, 3),
    ]
    assert (metrics / "accuracy").exists()


def test_a_run_feeds_its_sinks(tmp_path):
    import paceline
    from tests.unit.observe import sink_loop

    paceline.launch(sink_loop.train, workers=2, shards=2, threads=1, sink=["csv", Mine], out=tmp_path)
    assert {("1", "seen"), ("2", "train/loss"), ("2", "seen")} <= {row[:2] for row in rows(tmp_path)}
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (tmp_path / "mine.txt").read_text().split() == kinds

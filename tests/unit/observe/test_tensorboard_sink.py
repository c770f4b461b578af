import subprocess
import sys
import time

import pytest

from paceline.errors import InputError
from paceline.observe import EpochFinished, Evaluated, Note, StepFinished, TensorBoardSink

RESUMED = """
import sys
from paceline.observe import RunStarted, StepFinished, TensorBoardSink
sink = TensorBoardSink(sys.argv[1])
sink.emit(RunStarted("t", "ddp", 2, 2, "bitwise", "cpu", "gloo", 1, 1, 1, 9, None, 2, "out"))
sink.emit(StepFinished(3, 0, 0.25, 64, 0.5, 1e-3))
sink.close()
assert "torch" not in sys.modules
"""


def scalars(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(each.step, each.value) for each in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_curves_can_be_read_back(tmp_path):
    sink = TensorBoardSink(tmp_path, every=0.0)
    sink.emit(StepFinished(1, 0, 1.0, 64, 0.5, 1e-3, 2.0))
    sink.emit(StepFinished(2, 0, 0.5, 64, 0.5, 1e-3))
    sink.emit(EpochFinished(0, 2, 0.75))
    sink.emit(Evaluated(2, 0, {"accuracy": 0.5}, 10, 0.1))
    sink.emit(Note("no curve"))
    sink.close()
    got = scalars(tmp_path / "tensorboard")
    assert got["train/loss"] == [(1, 1.0), (2, 0.5)]
    assert got["train/gradient_norm"] == [(1, 2.0)]
    assert got["train/samples_per_second"] == [(1, 128.0), (2, 128.0)]
    assert got["epoch/loss"] == [(2, 0.75)]
    assert got["eval/accuracy"] == [(2, 0.5)]


def test_a_resumed_run_replaces_the_steps_it_repeats_without_torch(tmp_path):
    sink = TensorBoardSink(tmp_path, every=0.0)
    for number in range(1, 6):
        sink.emit(StepFinished(number, 0, 1.0, 64, 0.5, 1e-3))
    sink.close()
    subprocess.run([sys.executable, "-c", RESUMED, str(tmp_path)], check=True)
    assert scalars(tmp_path / "tensorboard")["train/loss"] == [(1, 1.0), (2, 1.0), (3, 0.25)]


def test_quick_steps_are_thinned_but_the_newest_is_never_missing(tmp_path):
    sink = TensorBoardSink(tmp_path, every=60)
    for number in range(1, 101):
        sink.emit(StepFinished(number, 0, 1.0, 64, 0.5, 1e-3))
    sink.emit(EpochFinished(0, 100, 0.75))
    sink.emit(StepFinished(101, 1, 1.0, 64, 0.5, 1e-3))
    sink.close()
    assert [step for step, _ in scalars(tmp_path / "tensorboard")["train/loss"]] == [1, 100, 101]


def test_a_missing_package_is_said_with_the_command_that_helps(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(
        sys, "meta_path", [finder for finder in sys.meta_path if "Editable" not in str(finder)]
    )
    with pytest.raises(InputError, match=r"pip install \"paceline\[tensorboard\]\""):
        TensorBoardSink(tmp_path)


def test_a_file_comes_after_one_of_the_same_second(tmp_path):
    earlier = tmp_path / f"events.out.tfevents.{int(time.time()) + 1}.zzz.1.0"
    earlier.touch()
    TensorBoardSink(tmp_path).close()
    assert min(tmp_path.iterdir()) == earlier

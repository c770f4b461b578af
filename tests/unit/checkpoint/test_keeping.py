"""Which checkpoints stay, which go, and saving the same step again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import Checkpoints, load
from paceline.errors import CheckpointError, InputError
from tests.unit.checkpoint.states import MODEL, assert_same, refuse, run_state


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_last_ones_stay_by_number_not_by_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (8, 9, 10, 11):
        checkpoints.save(step, run_state(step))
    assert names(tmp_path) == {"step-10", "step-11"}
    loaded = checkpoints.newest(refuse)
    assert loaded is not None
    assert loaded.step == 11


def test_the_one_just_written_stays_even_below_others(tmp_path: Path) -> None:
    Checkpoints(tmp_path, keep=5).save(90, run_state(90))
    Checkpoints(tmp_path, keep=1).save(3, run_state(3))
    assert names(tmp_path) == {"step-3", "step-90"}


def test_the_same_step_again_changes_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(5, run_state(5))
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert checkpoints.save(5, run_state(5) | {"meta": {"workers": 1}}) == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before


@pytest.mark.parametrize("part", ["model", "optimizer", "position"])
def test_the_same_step_with_another_state_is_refused(tmp_path: Path, part: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, run_state(5))
    with pytest.raises(CheckpointError, match="holds another state"):
        checkpoints.save(5, run_state(5) | {part: run_state(6)[part]})
    assert_same(load(tmp_path / "step-5").state, run_state(5))


def test_a_damaged_step_is_put_right_when_the_run_comes_there_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(5, run_state(5))
    (path / MODEL).write_bytes(b"")
    checkpoints.save(5, run_state(5))
    assert_same(load(path).state, run_state(5))
    assert names(tmp_path) == {"step-5"}


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "0"]) as ended:
        ended.wait()
    with subprocess.Popen(["/bin/sleep", "60"]) as living:
        for name in (
            f".step-4.partial-{ended.pid}",
            f".step-1.removed-{ended.pid}",
            f".step-4.partial-{living.pid}",
            f".step-4.partial-{os.getpid()}",
            "notes",
        ):
            (tmp_path / name).mkdir()
            (tmp_path / name / MODEL).write_bytes(b"half")
        Checkpoints(tmp_path).save(5, run_state(5))
        left = names(tmp_path)
        living.kill()
    assert left == {"step-5", "notes", f".step-4.partial-{living.pid}"}


def test_no_folder_means_no_checkpoint(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nothing").newest(refuse) is None
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        load(tmp_path / "nothing" / "step-1")


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_what_was_loaded_survives_the_end_of_its_files(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(5, run_state(5))
    loaded = load(path)
    for file in path.iterdir():
        os.truncate(file, 0)
    assert torch.equal(loaded.state["model"]["layer.weight"], run_state(5)["model"]["layer.weight"])

"""Which checkpoints stay, which go, and saving the same step again."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import export, load
from paceline.checkpoint.best import Score, best_of
from paceline.checkpoint.inspection import inspect
from paceline.errors import CheckpointError, DiskFaultError, InputError
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import EXTRA_STATE, MANIFEST, PART, assert_same, refuse, run_state


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


def test_what_somebody_else_put_there_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    old = checkpoints.save(1, run_state(1))
    (old / "notes.txt").write_text("mine")
    (tmp_path / "step-0").mkdir()
    (tmp_path / "step-0" / "other.txt").write_text("mine")
    for step in (2, 3):
        checkpoints.save(step, run_state(step))
    assert names(tmp_path) == {"step-0", "step-1", "step-3"}
    assert names(tmp_path / "step-1") == {"notes.txt"}
    assert names(tmp_path / "step-0") == {"other.txt"}
    loaded = checkpoints.newest(refuse)
    assert loaded is not None
    assert loaded.step == 3


@pytest.mark.parametrize("damaged", [False, True])
def test_a_folder_of_somebody_else_is_not_replaced(tmp_path: Path, damaged: bool) -> None:
    checkpoints = Checkpoints(tmp_path)
    if damaged:
        (checkpoints.save(5, run_state(5)) / PART).write_bytes(b"")
    (tmp_path / "step-5").mkdir(exist_ok=True)
    (tmp_path / "step-5" / "thesis.txt").write_text("mine")
    with pytest.raises(
        DiskFaultError, match=r"step-5: it is there already and holds files that are none of a checkpoint"
    ):
        checkpoints.save(5, run_state(5))
    assert (tmp_path / "step-5" / "thesis.txt").read_text() == "mine"
    assert names(tmp_path) == {"step-5"}


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-5").write_text("mine")
    with pytest.raises(DiskFaultError, match="is there already"):
        Checkpoints(tmp_path).save(5, run_state(5))
    assert (tmp_path / "step-5").read_text() == "mine"


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


def test_a_step_that_this_run_has_saved_itself_is_replaced(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, run_state(5))
    checkpoints.own.add(5)
    changed = run_state(5) | {"model": run_state(6)["model"]}
    checkpoints.save(5, changed)
    assert_same(load(tmp_path / "step-5").state, changed)
    assert names(tmp_path) == {"step-5"}


def test_a_file_put_into_a_step_of_this_runs_own_costs_neither(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(5, run_state(5))
    checkpoints.own.add(5)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(DiskFaultError, match=r"step-5: it is there already and holds files that are none"):
        checkpoints.save(5, run_state(5) | {"model": run_state(6)["model"]})
    assert_same(load(path).state, run_state(5))
    assert (path / "notes.txt").read_text() == "mine"
    assert names(tmp_path) == {"step-5"}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("leads", ["nowhere", "elsewhere/step-5", "elsewhere/damaged"])
def test_a_link_is_never_replaced(tmp_path: Path, leads: str, own: bool) -> None:
    folder = tmp_path / "checkpoints"
    other = Checkpoints(tmp_path / "elsewhere").save(5, run_state(5))
    (shutil.copytree(other, other.with_name("damaged")) / PART).write_bytes(b"")
    folder.mkdir()
    (folder / "step-5").symlink_to(tmp_path / leads)
    checkpoints = Checkpoints(folder)
    checkpoints.own |= {5} if own else set()
    with pytest.raises(CheckpointError, match=r"step-5.* is there already"):
        checkpoints.save(5, run_state(5) | {"model": run_state(6)["model"]})
    assert names(folder) == {"step-5"}
    assert (folder / "step-5").is_symlink()
    assert_same(load(other).state, run_state(5))


def test_an_old_name_of_a_replaced_step_goes_and_counts_as_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (3, 4):
        checkpoints.save(step, run_state(step))
    shutil.copytree(tmp_path / "step-4", tmp_path / "step-04")
    checkpoints.save(4, run_state(4))
    assert names(tmp_path) == {"step-3", "step-4"}


def test_a_damaged_step_is_put_right_when_the_run_comes_there_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(5, run_state(5))
    (path / PART).write_bytes(b"")
    checkpoints.save(5, run_state(5))
    assert_same(load(path).state, run_state(5))
    assert names(tmp_path) == {"step-5"}


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"half"), lambda file: file.unlink()])
@pytest.mark.parametrize("name", [PART, EXTRA_STATE, MANIFEST])
def test_damaged_ones_do_not_count_among_those_kept(
    tmp_path: Path, damage: Callable[[Path], object], name: str
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, run_state(step))
    damage(tmp_path / "step-2" / name)
    checkpoints.save(3, run_state(3))
    assert names(tmp_path) == {"step-1", "step-2", "step-3"}
    damage(tmp_path / "step-3" / name)
    reports: list[Path] = []
    loaded = checkpoints.newest(lambda path, reason: reports.append(path))
    assert loaded is not None
    assert (loaded.step, reports) == (1, [tmp_path / "step-3", tmp_path / "step-2"])
    for step in (4, 5):
        checkpoints.save(step, run_state(step))
    assert names(tmp_path) == {"step-4", "step-5"}


def test_a_run_that_fell_back_below_damaged_ones_keeps_what_it_stands_on(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        Checkpoints(tmp_path).save(step, run_state(step))
    for step in (20, 30):
        (tmp_path / f"step-{step}" / EXTRA_STATE).unlink()
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(12, run_state(12))
    checkpoints.save(14, run_state(14))
    assert names(tmp_path) == {"step-12", "step-14", "step-20", "step-30"}


def test_any_file_may_be_read_by_whom_the_others_may(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path / "checkpoints").save(1, run_state(1))
    modes = {file.name: stat.filemode(file.stat().st_mode) for file in path.iterdir()}
    assert modes[PART] == modes[EXTRA_STATE] == modes[MANIFEST]
    exported = export(tmp_path, tmp_path / "model.safetensors").path
    assert stat.filemode(exported.stat().st_mode) == modes[PART]


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


def scored(step: int, value: float, mode: str = "max") -> dict[str, object]:
    state = run_state(step)
    state["meta"]["best"] = {"value": value, "mode": mode, "metric": ""}
    return state


def test_the_best_are_kept_apart_from_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=1, keep_best=2)
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.7), (5, 0.1)):
        checkpoints.save(step, scored(step, value))
    for step in (6, 7):
        checkpoints.save(step, run_state(step))
    assert names(folder) == {"step-2", "step-3", "step-7"}  # of two that are equal the earlier
    assert [one.step for one in best_of(tmp_path)] == [2, 3]
    assert [one.step for one in inspect(tmp_path).best] == [2, 3]
    assert export(tmp_path, tmp_path / "model.safetensors", best=True).step == 2
    assert not checkpoints.admits(8, Score(0.7, "max"))
    assert checkpoints.admits(8, Score(0.8, "max"))
    assert checkpoints.admits(3, Score(0.1, "max"))  # as it was decided then: one better was there before
    assert not checkpoints.admits(8, Score(float("nan"), "max"))
    with pytest.raises(InputError, match=r"those of score 0\.9 \(max\) \(step 2\).*cannot be compared"):
        checkpoints.admits(8, Score(0.1, "min"))


def test_a_score_is_added_to_a_step_and_not_lost(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, run_state(1))
    checkpoints.own.add(1)
    checkpoints.save(1, scored(1, 0.5, "min"))
    checkpoints.save(1, run_state(1))
    checkpoints.save(2, scored(2, 0.6, "min"))
    checkpoints.save(3, run_state(3))
    assert names(tmp_path) == {"step-1", "step-3"}
    (tmp_path / "step-1" / PART).write_bytes(b"")  # damaged, so it is none of the best
    checkpoints.save(4, scored(4, 0.7, "min"))
    checkpoints.save(5, run_state(5))
    assert names(tmp_path) == {"step-4", "step-5"}


def test_a_run_without_a_best_says_so(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, run_state(1))
    with pytest.raises(CheckpointError, match="has no best checkpoint"):
        export(tmp_path, tmp_path / "model.safetensors", best=True)

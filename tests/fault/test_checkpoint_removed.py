"""A folder that is removed under a running writer is made again, and the run goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline.checkpoint import load
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import assert_same, refuse, run_state
from tests.unit.checkpoint.victims import executioner, lose_folder


@pytest.mark.parametrize("doomed", ["run", "run/checkpoints", "run/checkpoints/step-1"])
def test_removed_between_two_saves(tmp_path: Path, doomed: str) -> None:
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    checkpoints.save(1, run_state(1))
    shutil.rmtree(tmp_path / doomed)
    checkpoints.save(2, run_state(2))
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-2"]
    loaded = checkpoints.newest(refuse)
    assert loaded is not None
    assert_same(loaded.state, run_state(2))


@pytest.mark.parametrize("doomed", ["run", "run/checkpoints"])
def test_removed_before_any_operation_of_a_save(tmp_path: Path, doomed: str) -> None:
    saved = 0
    with executioner() as have_done:
        for number in range(1, 200):
            place = tmp_path / str(number)
            folder = place / "run" / "checkpoints"
            for step in (1, 2):
                Checkpoints(folder).save(step, run_state(step))
            said, was_removed = have_done(lose_folder, number, place / doomed, folder, 3)
            assert said == ""
            if not was_removed:
                break
            if folder.exists():
                assert [path.name for path in folder.iterdir()] == ["step-3"]
                assert_same(load(folder / "step-3").state, run_state(3))
                saved += 1
            Checkpoints(folder).save(4, run_state(4))
            assert {path.name for path in folder.iterdir()} <= {"step-3", "step-4"}
            assert_same(load(folder / "step-4").state, run_state(4))
    assert number > 20, "the folder was hardly ever removed"
    assert saved > 10, "no save survived the loss of its folder"

"""A writer killed at any moment leaves every committed checkpoint whole, and nothing that looks like one."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.checkpoint import load
from paceline.checkpoint.compare import same
from paceline.checkpoint.inspection import inspect
from paceline.errors import CheckpointError
from paceline.training.folder import newest_step
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import EXTRA_STATE, MANIFEST, PART, assert_same, refuse, run_state
from tests.unit.checkpoint.victims import (
    FORKSERVER,
    KEEP,
    changed_state,
    die_at_byte,
    die_at_call,
    executioner,
    long_state,
    replace_and_look,
)
from tests.unit.checkpoint.writer import WIDTH, die_at_operation, save_forever


def whole_steps(folder: Path, width: int = 8) -> list[int]:
    """Give the steps of all whole checkpoints, each compared with what was saved; the newest is found."""
    whole: list[int] = []
    for path in Checkpoints(folder).committed():
        with suppress(CheckpointError):
            one = load(path)
            assert_same(one.state, run_state(one.step, width))
            whole.append(one.step)
    newest = Checkpoints(folder).newest(lambda path, reason: None)
    assert newest is not None
    assert newest.step == whole[-1]
    return whole


def contents(folder: Path) -> list[tuple[str, int]]:
    """Give every name and size below a folder, without what differs from one process to the next."""
    return sorted(
        (re.sub(r"-[0-9a-f]{8}-\d+-\d+|\.tmp\w+", "", str(path.relative_to(folder))), path.lstat().st_size)
        for path in folder.rglob("*")
    )


@pytest.fixture
def three_steps(tmp_path: Path) -> Path:
    """Give a folder with two whole steps and a third that is damaged."""
    folder = tmp_path / "before"
    for step in (1, 2, 3):
        Checkpoints(folder).save(step, run_state(step))
    os.truncate(folder / "step-3" / PART, 5)
    return folder


def test_death_at_every_call_of_the_kernel(tmp_path: Path, three_steps: Path) -> None:
    """Step 3 is written, takes the place of the damaged one, and step 1 is deleted."""
    left: list[tuple[str, int]] = []
    outcomes: list[list[int]] = []
    with executioner() as have_done:
        for number in range(1, 1000):
            folder = shutil.copytree(three_steps, tmp_path / "death", copy_function=os.link)
            status = have_done(die_at_call, number, folder, 3)
            if status is None:
                pytest.skip("the kernel lets no process trace another here")
            if left != (left := contents(folder)):
                outcomes.append(whole_steps(folder))
                assert_next_save_cleans_up(folder, outcomes[-1])
            shutil.rmtree(folder)
            if status == 0:
                break
            assert status == -signal.SIGKILL
    assert number > 60
    assert len(outcomes) > 15
    in_order = [steps for before, steps in zip([[], *outcomes], outcomes, strict=False) if steps != before]
    assert in_order == [[1, 2], [1, 2, 3], [2, 3]]


def test_death_at_any_operation_of_a_save_that_replaces_the_only_checkpoint(tmp_path: Path) -> None:
    """A step is saved once more with another state: the old one is whole until the new one is there."""
    old, new = run_state(3), changed_state(3)
    folder, snapshots = tmp_path / "checkpoints", tmp_path / "deaths"
    Checkpoints(folder).save(3, old)
    with executioner() as have_done:
        deaths = have_done(replace_and_look, folder, 3, snapshots)
    assert [path.name for path in folder.iterdir()] == ["step-3"]
    found = []
    for number in range(deaths):
        left = snapshots / str(number)
        newest = Checkpoints(left).newest(refuse)
        assert newest is not None, f"nothing whole among {sorted(path.name for path in left.iterdir())}"
        assert inspect(left).manifest.step == newest_step_of(left) == 3
        found.append(same(newest.state, new))
        assert found[-1] or same(newest.state, old)
        for step in (3, 4):  # a resumed run may come to the same step, and goes on from there
            resumed = Checkpoints(left, keep=1)
            resumed.own.add(3)
            resumed.save(step, new if step == 3 else run_state(4))
            assert [path.name for path in left.iterdir()] == [f"step-{step}"]
    assert found == sorted(found)
    assert len(found) > 8
    assert {False, True} == set(found)


def newest_step_of(folder: Path) -> int | None:
    """Return the step that a launcher finds."""
    (folder.parent / f"{folder.name}-run").mkdir()
    (folder.parent / f"{folder.name}-run" / "checkpoints").symlink_to(folder)
    return newest_step(folder.parent / f"{folder.name}-run")


def assert_next_save_cleans_up(folder: Path, whole: list[int]) -> None:
    damaged = {path.name for path in Checkpoints(folder).committed()} - {f"step-{step}" for step in whole}
    Checkpoints(folder, keep=KEEP).save(4, run_state(4))
    assert whole_steps(folder) == [whole[-1], 4]
    assert {path.name for path in folder.iterdir()} == {f"step-{whole[-1]}", "step-4"} | damaged


def test_death_at_any_byte_of_any_file(tmp_path: Path) -> None:
    before = tmp_path / "before"
    Checkpoints(before).save(1, run_state(1))
    whole = Checkpoints(tmp_path / "whole").save(2, long_state(2))
    sizes = [(whole / name).stat().st_size for name in (PART, EXTRA_STATE, MANIFEST)]
    assert sizes == sorted(sizes), "a limit must reach the files in the order they are written"
    died_in: set[str] = set()
    with executioner() as have_done:
        for size in range(0, sizes[-1], 127):
            folder = shutil.copytree(before, tmp_path / f"death-{size}")
            assert have_done(die_at_byte, size, folder, 2) == -signal.SIGXFSZ
            [partial] = folder.glob(".step-2.partial-*")
            files = sorted(partial.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            # safetensors asks for the whole size at once, and so it dies before the first byte.
            assert files[-1].stat().st_size == (0 if files[-1].name.startswith(".tmp") else size)
            died_in.add(files[-1].name)
            assert whole_steps(folder) == [1]
            Checkpoints(folder).save(2, run_state(2))
            assert {path.name for path in folder.iterdir()} == {"step-1", "step-2"}
            assert whole_steps(folder) == [1, 2]
        assert have_done(die_at_byte, sizes[-1], before, 2) == 0
    assert {EXTRA_STATE, MANIFEST} < died_in, "no death in one of the files"


def test_death_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    moments = random.Random(20)
    committed = 0
    for _ in range(10):
        receiving, sending = FORKSERVER.Pipe(duplex=False)
        process = FORKSERVER.Process(target=save_forever, args=(tmp_path, committed + 1, sending))
        process.start()
        sending.close()
        told = committed
        with receiving:
            if receiving.poll(20):
                told = receiving.recv()
            time.sleep(moments.uniform(0, 0.04))
            process.kill()
            process.join()
            process.close()
            while receiving.poll():
                try:
                    told = receiving.recv()
                except EOFError:
                    break
        newest = Checkpoints(tmp_path).newest(refuse)
        assert newest is not None
        assert newest.step >= told > committed
        assert newest.step == whole_steps(tmp_path, WIDTH)[-1]
        committed = newest.step


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_goes_on_where_the_dead_one_was(tmp_path: Path, keep: int) -> None:
    process = FORKSERVER.Process(target=die_at_operation, args=(tmp_path, 1, 6))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    process.close()
    assert any(path.name.startswith(".step-1.partial-") for path in tmp_path.iterdir())
    assert Checkpoints(tmp_path).newest(refuse) is None
    Checkpoints(tmp_path, keep=keep).save(1, run_state(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]

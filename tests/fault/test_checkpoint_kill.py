"""A writer killed at any moment leaves every committed checkpoint whole, and nothing that looks like one."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from paceline.checkpoint import Checkpoints, load
from tests.unit.checkpoint.states import assert_same, refuse, run_state
from tests.unit.checkpoint.writer import WIDTH, die_at_operation, save_forever

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.unit.checkpoint.writer"])


def assert_all_whole(folder: Path) -> list[int]:
    """Read every committed checkpoint, compare each with what was saved, and give their steps."""
    loaded = [load(path) for path in Checkpoints(folder).committed()]
    for one in loaded:
        assert_same(one.state, run_state(one.step, WIDTH))
    return [one.step for one in loaded]


def test_death_at_every_operation_on_the_folder(tmp_path: Path) -> None:
    before = tmp_path / "before"
    for step in (1, 2):
        Checkpoints(before, keep=2).save(step, run_state(step, WIDTH))
    outcomes = []
    for number in range(1, 200):
        folder = shutil.copytree(before, tmp_path / f"death-{number}")
        process = FORKSERVER.Process(target=die_at_operation, args=(folder, 3, number))
        process.start()
        process.join()
        status = process.exitcode
        process.close()
        outcomes.append(assert_all_whole(folder))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        Checkpoints(folder, keep=2).save(4, run_state(4, WIDTH))
        steps = assert_all_whole(folder)
        assert {path.name for path in folder.iterdir()} == {f"step-{step}" for step in steps}
        assert steps == [outcomes[-1][-1], 4]
    assert outcomes[0] == [1, 2]
    assert outcomes[-1] == [2, 3]
    assert [1, 2, 3] in outcomes, "no death fell between the commit and the deletion of the oldest"
    assert len(outcomes) > 10


def test_death_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    moments = random.Random(20)
    committed = 0
    for _ in range(15):
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
        assert newest.step == assert_all_whole(tmp_path)[-1]
        committed = newest.step


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_goes_on_where_the_dead_one_was(tmp_path: Path, keep: int) -> None:
    process = FORKSERVER.Process(target=die_at_operation, args=(tmp_path, 1, 4))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    process.close()
    assert any(path.name.startswith(".step-1.partial-") for path in tmp_path.iterdir())
    assert Checkpoints(tmp_path).newest(refuse) is None
    Checkpoints(tmp_path, keep=keep).save(1, run_state(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]

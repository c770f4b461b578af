"""What dead writers left goes at the next save, and what living ones write stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from paceline.checkpoint import export
from paceline.checkpoint.leftovers import UNTOUCHED_S, beside
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import PART, run_state

OURS = re.fullmatch(r"\.x\.partial-([0-9a-f]{8})-(\d+)-(\d+)", beside(Path("x"), "partial").name)
assert OURS is not None
MACHINE = OURS[1]


def started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def leave(folder: Path, name: str, age_s: float = 0) -> str:
    """Leave half a checkpoint behind that was last touched some time ago."""
    (folder / name).mkdir(parents=True)
    (folder / name / PART).write_bytes(b"half")
    for path in (folder / name / PART, folder / name):
        os.utime(path, (time.time() - age_s,) * 2)
    return name


def left_after_a_save(folder: Path) -> set[str]:
    Checkpoints(folder).save(5, run_state(5))
    return {path.name for path in folder.iterdir()} - {"step-5"}


def test_our_own_name_says_who_we_are() -> None:
    assert OURS is not None
    assert (int(OURS[2]), OURS[3]) == (os.getpid(), started(os.getpid()))


def test_the_dead_and_the_living(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as living:
        since = started(living.pid)
        stays = leave(tmp_path, f".step-4.partial-{MACHINE}-{living.pid}-{since}", age_s=9 * UNTOUCHED_S)
        # The same number at another time: a process that ended, and whose number was given away again.
        leave(tmp_path, f".step-4.partial-{MACHINE}-{living.pid}-{int(since) - 1}")
        leave(tmp_path, f".step-1.removed-{MACHINE}-{living.pid}-{int(since) - 1}")
        # Our own, from a save that failed.
        leave(tmp_path, beside(tmp_path / "step-3", "partial").name)
        other = leave(tmp_path, "notes", age_s=9 * UNTOUCHED_S)
        left = left_after_a_save(tmp_path)
        living.kill()
    assert left == {stays, other}


def test_what_somebody_else_put_into_one_that_was_being_deleted_comes_back(tmp_path: Path) -> None:
    doomed = leave(tmp_path, beside(tmp_path / "step-3", "removed").name)
    (tmp_path / doomed / "notes.txt").write_text("mine")
    assert left_after_a_save(tmp_path) == {"step-3"}
    assert [path.name for path in (tmp_path / "step-3").iterdir()] == ["notes.txt"]


def test_one_that_died_and_was_not_noticed_by_its_parent_yet(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as victim:
        leave(tmp_path, f".step-4.partial-{MACHINE}-{victim.pid}-{started(victim.pid)}")
        victim.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
        assert left_after_a_save(tmp_path) == set()


@pytest.mark.parametrize("writer", ["00000000-1-1", "1", "somebody"])
def test_what_another_machine_writes_stays_until_it_lies_still(tmp_path: Path, writer: str) -> None:
    stays = leave(tmp_path, f".step-4.partial-{writer}", age_s=UNTOUCHED_S / 2)
    leave(tmp_path, f".step-3.partial-{writer}", age_s=UNTOUCHED_S * 2)
    leave(tmp_path, f".step-2.removed-{writer}", age_s=UNTOUCHED_S * 2)
    at_work = leave(tmp_path, f".step-1.partial-{writer}", age_s=UNTOUCHED_S * 2)
    os.utime(tmp_path / at_work / PART)
    assert left_after_a_save(tmp_path) == {stays, at_work}


def test_an_export_clears_its_own_name_only(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "checkpoints").save(1, run_state(1))
    target = tmp_path / "out" / "model.safetensors"
    leave(target.parent, f".model.safetensors.partial-{MACHINE}-{os.getpid()}-1")
    other = leave(target.parent, f".other.safetensors.partial-{MACHINE}-{os.getpid()}-1")
    export(tmp_path, target)
    assert {path.name for path in target.parent.iterdir()} == {target.name, other}

"""A disk that is full, read-only or no folder gives one clear line and harms nothing that was there."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.checkpoint import export, load
from paceline.checkpoint.leftovers import beside
from paceline.errors import CheckpointError, DiskFaultError
from paceline.verify.receipts.audit import audit
from paceline.world import fault_points
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import assert_same, refuse, run_state
from tests.unit.checkpoint.victims import (
    executioner,
    note_as_nobody,
    read_as_nobody,
    save_as_nobody,
    save_with_failing,
)

LARGE = 100_000


@contextmanager
def longest_file(size: int) -> Iterator[None]:
    """Let no file grow beyond a size: the kernel then fails the write in the middle, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a disk of 512 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    made = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=512k", "tmpfs", place], check=False, capture_output=True
    )
    if made.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {made.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)  # noqa: S607


def assert_refused(folder: Path, state: dict[str, Any], says: str) -> None:
    """Have step 2 refused with one line, and find step 1 as it was and nothing else."""
    with pytest.raises(DiskFaultError) as caught:
        Checkpoints(folder, keep=1).save(2, state)
    assert_harmless(folder, str(caught.value), says)


def assert_harmless(folder: Path, message: str, says: str) -> None:
    assert message.startswith(f"cannot write {folder / 'step-2'}: {says}. ")
    assert "\n" not in message
    assert [path.name for path in folder.iterdir()] == ["step-1"]
    assert_same(load(folder / "step-1").state, run_state(1))


@pytest.mark.parametrize(
    "part",
    [
        {"model": {"x": torch.zeros(LARGE)}},
        {"optimizer": {"state": {"x": {"exp_avg": torch.zeros(LARGE)}}, "groups": []}},
        {"scaler": {"x": torch.zeros(LARGE)}},
        {"meta": {"note": "x" * LARGE}},
    ],
    ids=["model", "optimizer", "rest", "manifest"],
)
def test_a_write_that_fails_in_any_of_the_files(tmp_path: Path, part: dict[str, Any]) -> None:
    Checkpoints(tmp_path).save(1, run_state(1))
    with longest_file(50_000):
        assert_refused(tmp_path, run_state(2) | part, "File too large")
    Checkpoints(tmp_path).save(2, run_state(2) | part)
    assert_same(load(tmp_path / "step-2").state, run_state(2) | part)


def test_what_a_failed_save_held_is_free_again(tmp_path: Path) -> None:
    def tensors() -> Counter[str]:
        alive = (one for one in gc.get_objects() if type(one) is torch.Tensor)
        return Counter(f"{one.dtype} {tuple(one.shape)}" for one in alive)

    square = torch.randn(300, 300).t()
    state = run_state(2) | {"model": {"x": square}, "scaler": {"y": square}}
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        with longest_file(50_000):
            for part in ("model", "scaler"):
                with suppress(CheckpointError):  # pytest.raises would hold on to it
                    Checkpoints(tmp_path).save(2, state | {part: {"x": torch.zeros(1)}})
        assert list(tmp_path.iterdir()) == [], "the disk took it"
        assert tensors() - before == Counter()
        assert before - tensors() == Counter()
    finally:
        gc.enable()


def test_what_is_no_fault_of_the_disk_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path).save(1, run_state(1) | {"scheduler": {"function": abs}})
    assert not isinstance(caught.value, DiskFaultError)
    Checkpoints(tmp_path).save(1, run_state(1))
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path).save(1, run_state(1) | {"model": {}})
    assert not isinstance(caught.value, DiskFaultError)


def test_a_disk_that_is_full_after_any_number_of_pages(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    Checkpoints(folder).save(1, run_state(1))
    state = run_state(2) | {
        "model": {"x": torch.zeros(5000)}, "scaler": {"y": torch.zeros(5000)}, "meta": {"note": "x" * 20_000}
    }  # fmt: skip
    free = shutil.disk_usage(small_disk).free
    page = os.sysconf("SC_PAGE_SIZE")
    for pages in range(free // page):
        with filler(small_disk, free - pages * page):
            try:
                Checkpoints(folder, keep=1).save(2, state)
                break
            except CheckpointError as error:
                assert_harmless(folder, str(error), "No space left on device")
    assert pages * page > 60_000, "not every file was reached"
    assert [path.name for path in folder.iterdir()] == ["step-2"]
    assert_same(load(folder / "step-2").state, state)


@contextmanager
def filler(place: Path, size: int) -> Iterator[None]:
    """Take up some room for a while."""
    (place / "filler").write_bytes(bytes(size))
    yield
    (place / "filler").unlink()


def test_a_disk_that_can_hold_no_more_files(small_disk: Path) -> None:
    Checkpoints(small_disk).save(1, run_state(1))
    taken = 6  # the root, the folder, its three files, and one that tmpfs keeps for itself
    for more in range(20):
        remount(small_disk, f"nr_inodes={taken + more}")
        try:
            Checkpoints(small_disk, keep=1).save(2, run_state(2))
            break
        except CheckpointError as error:
            assert_harmless(small_disk, str(error), "No space left on device")
    assert more >= 3, "not every file was refused"
    assert [path.name for path in small_disk.iterdir()] == ["step-2"]


def test_a_disk_full_of_what_a_dead_writer_left(small_disk: Path) -> None:
    left = beside(small_disk / "step-1", "partial")
    left = left.with_name(left.name + "0")  # our number, at another time
    left.mkdir()
    (left / "part-0.safetensors").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    assert shutil.disk_usage(small_disk).free == 0
    Checkpoints(small_disk).save(2, run_state(2))
    assert [path.name for path in small_disk.iterdir()] == ["step-2"]


def test_a_full_disk_under_an_export(small_disk: Path, tmp_path: Path) -> None:
    Checkpoints(tmp_path / "checkpoints").save(1, run_state(1) | {"model": {"x": torch.zeros(200_000)}})
    target = small_disk / "model.safetensors"
    with pytest.raises(
        CheckpointError, match=r"cannot write .*model\.safetensors: .*No space left on device"
    ):
        export(tmp_path, target)
    assert list(small_disk.iterdir()) == []


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)  # noqa: S607


def test_a_read_only_disk(small_disk: Path) -> None:
    Checkpoints(small_disk).save(1, run_state(1))
    remount(small_disk, "ro")
    assert_refused(small_disk, run_state(2), "Read-only file system")


def test_a_disk_that_becomes_read_only_in_the_middle(small_disk: Path) -> None:
    Checkpoints(small_disk).save(1, run_state(1))
    fault_points.set_fault(lambda name: remount(small_disk, "ro"))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*step-2: Read-only file system\. "):
            Checkpoints(small_disk).save(2, run_state(2))
    finally:
        fault_points.set_fault(None)
    loaded = Checkpoints(small_disk).newest(refuse)
    assert loaded is not None
    assert loaded.step == 1
    remount(small_disk, "rw")
    Checkpoints(small_disk).save(3, run_state(3))
    assert {path.name for path in small_disk.iterdir()} == {"step-1", "step-3"}


@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename"])
def test_a_disk_that_fails(tmp_path: Path, call: str) -> None:
    Checkpoints(tmp_path).save(1, run_state(1))
    with executioner() as have_done:
        message = have_done(save_with_failing, call, tmp_path, 2)
    if message is None:
        pytest.skip("the kernel does not let a process forbid itself a call here")
    assert_harmless(tmp_path, message, "Input/output error")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o555, 0o444, 0o000])
def test_a_folder_that_is_not_ours(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "checkpoints"
    Checkpoints(folder).save(1, run_state(1))
    tmp_path.chmod(0o777)
    folder.chmod(mode)
    with executioner() as have_done:
        message = have_done(save_as_nobody, tmp_path, 2)
        reasons = have_done(read_as_nobody, tmp_path) if mode == 0o444 else []
    assert message.startswith("cannot write checkpoints/step-2: Permission denied. ")
    assert all(reason == "manifest.json cannot be read (Permission denied)" for reason in reasons)
    assert len(reasons) == (mode == 0o444)
    assert [path.name for path in folder.iterdir()] == ["step-1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_old_one_that_cannot_be_deleted_is_told_and_the_new_one_is_safe() -> None:
    # Not below tmp_path, which only its owner can enter.
    with tempfile.TemporaryDirectory() as name, executioner() as have_done:
        place, folder = Path(name), Path(name) / "checkpoints"
        for step in (1, 2):
            Checkpoints(folder).save(step, run_state(step))
        place.chmod(0o777)
        folder.chmod(0o777)
        for deed, step in ((save_as_nobody, 3), (note_as_nobody, 4), (save_as_nobody, 5)):
            told = have_done(deed, place, step)
            assert told.startswith(f"checkpoints/step-{step} is safe, but ")
            assert "\n" not in told
            assert_same(load(folder / f"step-{step}").state, run_state(step))
        Checkpoints(folder).save(6, run_state(6))
        assert {path.name for path in folder.iterdir()} == {"step-4", "step-5", "step-6"}


@pytest.mark.parametrize("below", [".", "checkpoints", "run/checkpoints"])
def test_a_file_where_a_folder_is_expected(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("precious")
    folder = tmp_path / "file" / below
    with pytest.raises(CheckpointError, match=r"cannot write .*step-1"):
        Checkpoints(folder).save(1, run_state(1))
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(CheckpointError, match="cannot be read as a folder of checkpoints"):
        Checkpoints(folder).newest(refuse)


def train_on_a_small_disk(run: paceline.Run) -> None:
    """Take three steps of a model of 1 MB, and try to save each."""
    model = torch.nn.Linear(64, 4096)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(list(torch.ones(12, 64)), batch_size=4, epochs=1):
        for batch in step:
            step.backward(model(batch).sum(), len(batch))
        step.apply()


def test_a_run_that_could_save_nothing_keeps_its_folder_and_was_no_wrong_input(small_disk: Path) -> None:
    with pytest.raises(
        DiskFaultError, match=r"All 3 steps were taken, but no checkpoint was saved"
    ) as caught:
        paceline.launch(train_on_a_small_disk, workers=2, threads=1, out=small_disk / "run", save_every="1")
    assert "\n" not in str(caught.value)
    assert f"{small_disk / 'run'} is kept" in str(caught.value)
    assert caught.value.exit_status == 1
    events = [json.loads(line) for line in (small_disk / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3]
    assert events[-1]["kind"] == "run_failed"
    assert (small_disk / "run" / "receipt.json").exists()
    assert list((small_disk / "run" / "checkpoints").iterdir()) == []


def lose_a_worker_on_a_full_disk(run: paceline.Run, folder: str) -> str:
    """Fill the disk after some steps and lose a worker; make room again before the end, and return the weights."""
    model = torch.nn.Linear(8, 4)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(list(torch.ones(80, 8)), batch_size=4, epochs=1):
        for batch in step:
            step.backward(model(batch).sum(), len(batch))
        rubbish = Path(folder or ".") / "rubbish"
        if folder and step.number == 4 and run.world.rank == 1 and not run._engine.state.recoveries:
            with suppress(OSError), rubbish.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            os.kill(os.getpid(), signal.SIGKILL)
        if folder and 5 <= step.number < 15:
            time.sleep(0.1)  # a replacement is on its way, and finds no room
        if step.number == 15:
            rubbish.unlink(missing_ok=True)
        step.apply()
    return run.weights_sha256()


def test_a_worker_lost_on_a_full_disk_costs_neither_the_run_nor_what_is_recorded_of_it(
    small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (alone,) = paceline.launch(lose_a_worker_on_a_full_disk, "", workers=1, shards=3, threads=1)
    out = small_disk / "run"
    results = paceline.launch(
        lose_a_worker_on_a_full_disk, str(small_disk), workers=3, shards=3, threads=1, out=out
    )
    assert set(results) == {alone}
    told = [line for line in capfd.readouterr().err.splitlines() if "receipt.json" in line]
    assert len(told) == 1, told
    assert "No space left on device" in told[0]
    assert "The run goes on" in told[0]
    found = audit(out)
    assert found.holds, found.problems

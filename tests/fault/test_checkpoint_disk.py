"""A disk that is full, read-only or no folder gives one clear line and harms nothing that was there."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import Checkpoints, export, load
from paceline.errors import CheckpointError
from tests.unit.checkpoint.states import assert_same, refuse, run_state

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
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(folder).save(2, state)
    message = str(caught.value)
    assert str(folder / "step-2") in message
    assert says in message
    assert "\n" not in message
    assert [path.name for path in folder.iterdir()] == ["step-1"]
    assert_same(load(folder / "step-1").state, run_state(1))


@pytest.mark.parametrize(
    "part",
    [
        {"model": {"x": torch.zeros(LARGE)}},
        {"optimizer": {"state": {"x": {"exp_avg": torch.zeros(LARGE)}}, "groups": []}},
        {"meta": {"note": "x" * LARGE}},
    ],
    ids=["model", "optimizer", "manifest"],
)
def test_a_write_that_fails_in_any_of_the_files(tmp_path: Path, part: dict[str, Any]) -> None:
    Checkpoints(tmp_path).save(1, run_state(1))
    with longest_file(50_000):
        assert_refused(tmp_path, run_state(2) | part, "File too large")
    Checkpoints(tmp_path).save(2, run_state(2) | part)
    assert_same(load(tmp_path / "step-2").state, run_state(2) | part)


def test_a_full_disk(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    Checkpoints(folder).save(1, run_state(1))
    for numbers in range(20_000, 140_000, 20_000):
        state = run_state(2) | {"model": {"x": torch.zeros(numbers)}, "scaler": {"y": torch.zeros(120_000)}}
        assert_refused(folder, state, "No space left on device")
    Checkpoints(folder).save(2, run_state(2))
    assert_same(load(folder / "step-2").state, run_state(2))


def test_a_full_disk_under_an_export(small_disk: Path, tmp_path: Path) -> None:
    Checkpoints(tmp_path / "checkpoints").save(1, run_state(1) | {"model": {"x": torch.zeros(200_000)}})
    target = small_disk / "model.safetensors"
    with pytest.raises(
        CheckpointError, match=r"cannot write .*model\.safetensors: .*No space left on device"
    ):
        export(tmp_path, target)
    assert list(small_disk.iterdir()) == []


def test_a_read_only_disk(small_disk: Path) -> None:
    Checkpoints(small_disk).save(1, run_state(1))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)  # noqa: S607
    assert_refused(small_disk, run_state(2), "Read-only file system")


@pytest.mark.parametrize("below", [".", "checkpoints", "run/checkpoints"])
def test_a_file_where_a_folder_is_expected(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("precious")
    folder = tmp_path / "file" / below
    with pytest.raises(CheckpointError, match=r"cannot write .*step-1"):
        Checkpoints(folder).save(1, run_state(1))
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(CheckpointError, match="cannot be read as a folder of checkpoints"):
        Checkpoints(folder).newest(refuse)

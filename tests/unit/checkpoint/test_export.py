"""The weights leave as one file that safetensors itself can read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paceline.checkpoint import Checkpoints, export
from paceline.errors import CheckpointError, InputError
from tests.unit.checkpoint.states import MODEL, assert_same, run_state


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    for step in (1, 2):
        checkpoints.save(step, run_state(step))
    return tmp_path / "run"


def test_a_run_gives_its_newest(run_folder: Path, tmp_path: Path) -> None:
    report = export(run_folder, tmp_path / "new" / "model.safetensors")
    assert_same(load_file(report.path), run_state(2)["model"])
    assert (report.step, report.tensors, report.skipped) == (2, 2, ())
    assert report.size == report.path.stat().st_size
    with safe_open(report.path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "paceline_step": "2"}
    assert [file.name for file in report.path.parent.iterdir()] == ["model.safetensors"]


def test_damaged_ones_are_skipped_and_named(run_folder: Path, tmp_path: Path) -> None:
    newest = run_folder / "checkpoints" / "step-2"
    (newest / MODEL).unlink()
    report = export(run_folder, tmp_path / "model.safetensors")
    assert (report.step, report.source) == (1, run_folder / "checkpoints" / "step-1")
    assert report.skipped == ((newest, "model.safetensors is missing"),)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        export(newest, tmp_path / "other.safetensors")
    assert not (tmp_path / "other.safetensors").exists()


@pytest.mark.parametrize("source", ["checkpoints/step-1", "checkpoints"])
def test_one_checkpoint_or_the_folder_of_them(run_folder: Path, tmp_path: Path, source: str) -> None:
    report = export(run_folder / source, tmp_path / "model.safetensors")
    assert report.step == (1 if source.endswith("step-1") else 2)


def test_tied_weights_are_there_under_every_name(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    Checkpoints(tmp_path / "checkpoints").save(1, run_state(1) | {"model": {"embed": weight, "head": weight}})
    report = export(tmp_path, tmp_path / "model.safetensors")
    assert_same(load_file(report.path), {"embed": weight, "head": weight})


def test_what_is_there_stays_unless_told(run_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    target.write_text("precious")
    with pytest.raises(InputError, match="exists already"):
        export(run_folder, target)
    assert target.read_text() == "precious"
    export(run_folder, target, overwrite=True)
    assert_same(load_file(target), run_state(2)["model"])


def test_bad_names_and_empty_places_are_refused(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Try .*model\.safetensors"):
        export(run_folder, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export(tmp_path / "nowhere", tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot write .*model\.safetensors: "):
        export(run_folder, run_folder / "checkpoints" / "step-2" / MODEL / "model.safetensors")

"""The weights leave as one file that safetensors itself can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paceline.checkpoint import export
from paceline.cli import export as command
from paceline.errors import CheckpointError, InputError
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import PART, assert_same, run_state


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


def test_exports_of_one_checkpoint_are_the_same_bytes(run_folder: Path, tmp_path: Path) -> None:
    made = {export(run_folder, tmp_path / f"{number}.safetensors").sha256 for number in range(20)}
    assert len(made) == 1


def test_damaged_ones_are_skipped_and_named(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run_folder / "checkpoints" / "step-2"
    (newest / PART).unlink()
    report = export(run_folder, tmp_path / "model.safetensors")
    assert (report.step, report.source) == (1, run_folder / "checkpoints" / "step-1")
    assert report.skipped == ((newest, "step-2 needs 1 part and has 0: part-0.safetensors is missing"),)
    command.export(run_folder, tmp_path / "shown.safetensors", json_=True)
    assert json.loads(capsys.readouterr().out)["skipped"] == [[str(newest), report.skipped[0][1]]]
    with pytest.raises(CheckpointError, match=r"part-0\.safetensors is missing"):
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
        export(run_folder, run_folder / "checkpoints" / "step-2" / PART / "model.safetensors")


def test_a_set_of_files_is_laid_out_as_the_loaders_of_hugging_face_expect(
    run_folder: Path, tmp_path: Path
) -> None:
    weight = torch.randn(8, 8)
    state = {"embed": weight, "body": torch.randn(20, 20), "bias": torch.randn(3).bfloat16(), "head": weight}
    Checkpoints(run_folder / "checkpoints").save(3, run_state(3) | {"model": state})
    report = export(run_folder, tmp_path / "out" / "model.safetensors", max_shard_size="600")
    assert report.files == tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
    assert report.path == tmp_path / "out" / "model.safetensors.index.json"
    index = json.loads(report.path.read_text())
    assert index["metadata"] == {
        "total_size": sum(each.numel() * each.element_size() for each in state.values())
    }
    assert index["weight_map"] == {
        "embed": report.files[0], "body": report.files[1], "bias": report.files[2], "head": report.files[2]
    }  # fmt: skip
    assert {path.name for path in report.path.parent.iterdir()} == {*report.files, report.path.name}
    read: dict[str, torch.Tensor] = {}
    for name in report.files:
        part = load_file(report.path.with_name(name))
        assert part.keys() == {tensor for tensor, file in index["weight_map"].items() if file == name}
        read |= part
    assert_same(read, state)
    assert report.size == sum(report.path.with_name(name).stat().st_size for name in report.files)


def test_what_fits_into_one_file_is_one_file(run_folder: Path, tmp_path: Path) -> None:
    report = export(run_folder, tmp_path / "out" / "model.safetensors", max_shard_size="1.5 GB")
    assert [path.name for path in report.path.parent.iterdir()] == list(report.files) == ["model.safetensors"]


def test_a_set_gives_way_to_another(run_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model.safetensors"
    other = tmp_path / "out" / "models-00001-of-00002.safetensors"
    first = export(run_folder, target, max_shard_size="100")
    assert len(first.files) == 2
    other.write_text("precious")
    with pytest.raises(InputError, match=r"model\.safetensors\.index\.json exists already"):
        export(run_folder, target)
    export(run_folder, target, overwrite=True)
    assert {path.name for path in target.parent.iterdir()} == {target.name, other.name}
    with pytest.raises(InputError, match="exists already"):
        export(run_folder, target, max_shard_size="100")
    again = export(run_folder, target, max_shard_size="100", overwrite=True)
    assert {path.name for path in target.parent.iterdir()} == {*again.files, again.path.name, other.name}


@pytest.mark.parametrize("size", [None, "100"], ids=["one file", "a set"])
def test_files_that_no_export_wrote_stay(run_folder: Path, tmp_path: Path, size: str | None) -> None:
    target = tmp_path / "out" / "model.safetensors"
    theirs = [target.with_name(f"model-0000{number}-of-00003.safetensors") for number in (1, 2, 3)]
    theirs.append(target.with_name("model.safetensors.index.json.old"))
    target.parent.mkdir()
    for path in theirs:
        path.write_text("precious")
    export(run_folder, target, max_shard_size=size, overwrite=True)
    assert [path.read_text() for path in theirs] == ["precious"] * 4


@pytest.mark.parametrize("size", [None, "100"], ids=["one file", "a set"])
def test_a_folder_under_the_name_is_refused(run_folder: Path, tmp_path: Path, size: str | None) -> None:
    target = tmp_path / "model.safetensors"
    target.mkdir()
    (target / "precious.txt").write_text("precious")
    with pytest.raises(InputError, match="is a folder, and an export writes files"):
        export(run_folder, target, max_shard_size=size, overwrite=True)
    assert (target / "precious.txt").read_text() == "precious"


def test_an_index_that_lists_what_is_not_its_own(run_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model.safetensors"
    target.parent.mkdir()
    outside = tmp_path / "precious.safetensors"
    outside.write_text("precious")
    listed = {"a": "../precious.safetensors", "b": "/etc/hostname", "c": 3, "d": None}
    target.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    export(run_folder, target, overwrite=True)
    assert outside.read_text() == "precious"


@pytest.mark.parametrize("name", ["", "/", ".", "a" * 400 + ".safetensors", "a" * 240 + ".safetensors"])
def test_names_that_are_none(run_folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"Try|longer than|shorter"):
        export(run_folder, Path(name))


@pytest.mark.parametrize("size", ["", "0", "two", "5 potatoes", "-1GB", "9" * 400 + "GB", "0.1"])
def test_sizes_that_are_none(run_folder: Path, tmp_path: Path, size: str) -> None:
    with pytest.raises(InputError, match=r"is not a size\. Give one like 2GB"):
        export(run_folder, tmp_path / "model.safetensors", max_shard_size=size)

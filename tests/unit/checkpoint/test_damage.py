"""A damaged checkpoint is never used: it is named with the reason, and the one before serves."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import Checkpoints, load
from paceline.checkpoint.durable import seal
from paceline.checkpoint.manifest import Manifest, Stored, StoredBox
from paceline.errors import CheckpointError
from tests.unit.checkpoint.states import MANIFEST, PART, REST, assert_same, run_state

FILES = [PART, REST, MANIFEST]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2):
        Checkpoints(tmp_path).save(step, run_state(step))
    return tmp_path


def reason_for(folder: Path) -> str:
    """Have the newest one refused and the one before used, and give the reason."""
    reports: list[tuple[Path, str]] = []
    loaded = Checkpoints(folder).newest(lambda path, reason: reports.append((path, reason)))
    assert loaded is not None
    assert loaded.step == 1
    assert_same(loaded.state, run_state(1))
    [(path, reason)] = reports
    assert path == folder / "step-2"
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    return reason


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_noticed(folder: Path, name: str) -> None:
    whole = (folder / "step-2" / name).read_bytes()
    for length in (0, 1, 7, 8, len(whole) // 2, len(whole) - 1):
        (folder / "step-2" / name).write_bytes(whole[:length])
        reason = reason_for(folder)
        if name == MANIFEST:
            assert reason == "manifest.json is not valid JSON"
        else:
            assert reason == f"{name} is {len(whole) - length} bytes short"


@pytest.mark.parametrize("name", [PART, REST])
def test_every_flipped_byte_is_noticed(folder: Path, name: str) -> None:
    whole = (folder / "step-2" / name).read_bytes()
    for place in range(0, len(whole), len(whole) // 25):
        (folder / "step-2" / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert reason_for(folder) == f"{name}: sha256 differs"


def test_every_changed_character_of_the_manifest_is_noticed(folder: Path) -> None:
    path = folder / "step-2" / MANIFEST
    whole = path.read_bytes()
    intact = Manifest.read(folder / "step-2")
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            read_back = Manifest.read(folder / "step-2")
        except CheckpointError:
            continue
        assert read_back == intact, f"byte {place} was changed and nobody noticed"
    path.write_bytes(whole.replace(b'"step": 2', b'"step": 9', 1))
    assert reason_for(folder) == "manifest.json: sha256 differs"


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(folder: Path, name: str) -> None:
    (folder / "step-2" / name).unlink()
    count = "step-2 needs 1 part and has 0: " if name == PART else ""
    assert reason_for(folder) == f"{count}{name} is missing"


def test_a_file_that_grew_is_noticed(folder: Path) -> None:
    with (folder / "step-2" / PART).open("ab") as file:
        file.write(b"more")
    assert reason_for(folder) == "part-0.safetensors is 4 bytes too long"


def test_a_folder_in_place_of_a_file_is_noticed(folder: Path) -> None:
    (folder / "step-2" / REST).unlink()
    (folder / "step-2" / REST).mkdir()
    assert REST in reason_for(folder)


@pytest.mark.parametrize(
    "damage",
    [
        shutil.rmtree,
        lambda path: (shutil.rmtree(path), path.mkdir()),
        lambda path: (shutil.rmtree(path), path.write_text("a file")),
    ],
)
def test_without_any_whole_one_there_is_none(folder: Path, damage: Callable[[Path], object]) -> None:
    for step in (1, 2):
        damage(folder / f"step-{step}")
    reports: list[Path] = []
    assert Checkpoints(folder).newest(lambda path, reason: reports.append(path)) is None
    assert reports == [path for path in (folder / "step-2", folder / "step-1") if path.exists()]


def reseal(path: Path, **changes: Any) -> None:
    """Write the manifest anew, as one who means harm would, so that every checksum fits."""
    files = {name: seal(path / name) for name in (PART, REST)}
    dataclasses.replace(Manifest.read(path), files=files, **changes).write(path)


class Malice:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_malicious_pickle_is_refused(folder: Path, as_zip: bool) -> None:
    mark = folder / "harm-done"
    path = folder / "step-2" / REST
    torch.save({"optimizer": Malice(mark)}, path, _use_new_zipfile_serialization=as_zip)
    reseal(folder / "step-2")
    assert reason_for(folder) == "rest.pt holds objects other than tensors and numbers, and was refused"
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the file carries no harm, so refusing it proves nothing"


@pytest.mark.parametrize("content", [b"hello", pickle.dumps({"optimizer": 1}, 2), pickle.dumps([1], 2)])
def test_a_file_that_is_something_else_is_refused(folder: Path, content: bytes) -> None:
    (folder / "step-2" / REST).write_bytes(content)
    reseal(folder / "step-2")
    assert reason_for(folder).startswith("rest.pt ")


def test_a_model_file_that_is_something_else_is_refused(folder: Path) -> None:
    (folder / "step-2" / PART).write_bytes(b"\xff" * 64)
    reseal(folder / "step-2")
    assert reason_for(folder) == "part-0.safetensors does not hold model/layer.weight"


def test_an_alias_of_nothing_is_refused(folder: Path) -> None:
    reseal(folder / "step-2", aliases={"model/head": "model/nowhere"})
    assert reason_for(folder) == "manifest.json does not describe a checkpoint"


@pytest.mark.parametrize(
    "stored",
    [
        Stored((8, 8), "float32", (StoredBox(0, (0, 0), (4, 8)),)),
        Stored((8, 8), "float32", (StoredBox(1, (0, 0), (8, 8)),)),
    ],
    ids=["half of it is nowhere", "its part is nowhere"],
)
def test_a_tensor_that_is_nowhere_is_refused(folder: Path, stored: Stored) -> None:
    tensors = Manifest.read(folder / "step-2").tensors
    reseal(folder / "step-2", tensors=tensors | {"model/layer.weight": stored})
    assert reason_for(folder) == "manifest.json does not describe a checkpoint"


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        (Stored((64,), "float32", (StoredBox(0, (0,), (64,)),)), "holds another model/layer.weight than"),
        (Stored((8, 8), "int32", (StoredBox(0, (0, 0), (8, 8)),)), "holds another model/layer.weight than"),
        (Stored((8, 8), "load", (StoredBox(0, (0, 0), (8, 8)),)), "the type load of a tensor is not known"),
    ],
)
def test_a_tensor_that_is_another_is_refused(folder: Path, stored: Stored, says: str) -> None:
    tensors = Manifest.read(folder / "step-2").tensors
    reseal(folder / "step-2", tensors=tensors | {"model/layer.weight": stored})
    assert says in reason_for(folder)


def test_names_that_lead_elsewhere_are_refused(folder: Path) -> None:
    manifest = Manifest.read(folder / "step-2")
    files = {"../step-1/part-0.safetensors": manifest.files[PART], REST: manifest.files[REST]}
    dataclasses.replace(manifest, files=files).write(folder / "step-2")
    assert reason_for(folder) == "manifest.json does not describe a checkpoint"


@pytest.mark.parametrize("other", [1, 3])
def test_another_format_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, other: int) -> None:
    manifest = Manifest.read(folder / "step-2")
    with monkeypatch.context() as patch:
        patch.setattr("paceline.checkpoint.manifest.FORMAT", other)
        manifest.write(folder / "step-2")
    assert reason_for(folder) == f"manifest.json has format {other}, and this version reads only 2"

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

from paceline.checkpoint import load
from paceline.checkpoint.durable import sync_and_hash
from paceline.checkpoint.exporting import export
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.stored import Stored, StoredChunk
from paceline.checkpoint.terms import check_tensors
from paceline.cli.inspect import inspect
from paceline.documents import DocumentError
from paceline.errors import CheckpointError
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import EXTRA_STATE, MANIFEST, PART, assert_same, run_state

FILES = [PART, EXTRA_STATE, MANIFEST]


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


@pytest.mark.parametrize("name", [PART, EXTRA_STATE])
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
    (folder / "step-2" / EXTRA_STATE).unlink()
    (folder / "step-2" / EXTRA_STATE).mkdir()
    assert EXTRA_STATE in reason_for(folder)


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
    changes.setdefault("files", {name: sync_and_hash(path / name) for name in (PART, EXTRA_STATE)})
    made = dataclasses.replace(Manifest.read(path), **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manifest, "check", lambda _: None)
        made.write(path)


def cut(*chunks: tuple[tuple[int, ...], tuple[int, ...]], first: int = 0, parts: Any = None) -> Stored:
    return Stored(
        (8, 8),
        "float32",
        tuple(
            StoredChunk(part, *bounds) for part, bounds in zip(parts or range(first, 9), chunks, strict=False)
        ),
    )


class Malice:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_malicious_pickle_is_refused(folder: Path, as_zip: bool) -> None:
    mark = folder / "harm-done"
    path = folder / "step-2" / EXTRA_STATE
    torch.save({"optimizer": Malice(mark)}, path, _use_new_zipfile_serialization=as_zip)
    reseal(folder / "step-2")
    assert (
        reason_for(folder) == "extra_state.pt holds objects other than tensors and numbers, and was refused"
    )
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the file carries no harm, so refusing it proves nothing"


@pytest.mark.parametrize("content", [b"hello", pickle.dumps({"optimizer": 1}, 2), pickle.dumps([1], 2)])
def test_a_file_that_is_something_else_is_refused(folder: Path, content: bytes) -> None:
    (folder / "step-2" / EXTRA_STATE).write_bytes(content)
    reseal(folder / "step-2")
    assert reason_for(folder).startswith("extra_state.pt ")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": {}}, "optimizer: state is missing"),
        ({"optimizer": {"state": {}}}, "optimizer: groups is missing"),
        ({"optimizer": {"state": 3, "groups": []}}, "optimizer: state is a int, but must be a dict"),
        (
            {"optimizer": {"state": {"w": 3}, "groups": []}},
            "optimizer: state: 'w' is a int, but must be a dict",
        ),
        ({"optimizer": {"state": {}, "groups": "abc"}}, "optimizer: groups is a str, but must be a list"),
        ({"optimizer": {"state": {}, "groups": [3]}}, "optimizer: groups: 0 is a int, but must be a dict"),
        ({"optimizer": {"state": {}, "groups": [{}]}}, "optimizer: groups: 0: params is missing"),
        (
            {"optimizer": {"state": {}, "groups": [{"params": "a"}]}},
            "optimizer: groups: 0: params is a str, but",
        ),
        (
            {"optimizer": {"state": {}, "groups": [{"params": [1]}]}},
            "optimizer: groups: 0: params: 0 is a int, but",
        ),
        (
            {"optimizer": {"state": {}, "groups": [{"params": [], "lr": "x"}]}},
            "optimizer: groups: 0: lr is a str, but",
        ),
        ({"optimizer": {"state": {}, "groups": [], "own": 5}}, "optimizer: own is a int, but must be a dict"),
        ({"scheduler": 5}, "scheduler is a int, but must be"),
        ({"scheduler": "junk"}, "scheduler is a str, but must be"),
        ({"scheduler": {"last_epoch": "x"}}, "scheduler: last_epoch is a str, but must be a number"),
        ({"scaler": 5}, "scaler is a int, but must be a dict"),
        ({"between": 7}, "between is a int, but must be a list"),
        ({"changed": 7}, "changed is a int, but must be a dict"),
        ({"stream": 7}, "stream is a int, but must be a dict"),
        ({"stream": {"began": 7}}, "stream: began is a int, but must be text"),
        ({"stream": {"began": ""}}, "stream: last is missing"),
        (
            {"stream": {"began": "", "last": "", "first": "", "call": "x"}},
            "stream: call is a str, but must be a number",
        ),
        ({"loop": 3}, "loop is a int, but must be a dict"),
        ({"loop": {3: 3}}, "loop: a name in it is a int, but must be text"),
        ({"buffers": {"count": 3}}, "buffers: 'count' is a int, but must be a tensor"),
        ({"scheduler": ...}, "scheduler is missing"),
        ({"scaler": ...}, "scaler is missing"),
    ],
)
def test_a_rest_with_a_field_that_cannot_be_is_refused(
    folder: Path, changes: dict[str, Any], says: str
) -> None:
    path = folder / "step-2" / EXTRA_STATE
    rest = torch.load(path, weights_only=True) | changes
    torch.save({name: value for name, value in rest.items() if value is not ...}, path)
    reseal(folder / "step-2")
    assert reason_for(folder).startswith(f"extra_state.pt: {says}")
    with pytest.raises(CheckpointError, match=r"step-2 is damaged: extra_state\.pt: "):
        inspect(folder, verify=True)


def test_a_model_file_that_is_something_else_is_refused(folder: Path) -> None:
    (folder / "step-2" / PART).write_bytes(b"\xff" * 4096)
    reseal(folder / "step-2")
    assert reason_for(folder) == "part-0.safetensors does not hold model/layer.weight"


def test_an_alias_of_nothing_is_refused(folder: Path) -> None:
    reseal(folder / "step-2", aliases={"model/head": "model/nowhere"})
    assert reason_for(folder) == (
        "manifest.json does not describe a checkpoint (aliases: 'model/head' is tied to a tensor that is not there)"
    )


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        (cut(((0, 0), (4, 8))), "the chunks do not make up the tensor"),
        (cut(((0, 0), (8, 8)), first=1), "a chunk of it lies in part 1, which is not there"),
        (cut(((0, 0), (4, 8)), ((4, 0), (4, 8)), parts=[0, 0]), "two of its chunks lie in one part"),
        (cut(((5, 5), (8, 8))), "a chunk of [8, 8] at [5, 5] is not inside of [8, 8]"),
        (cut(((0, 0), (64,))), "a chunk of [64] at [0, 0] is not inside of [8, 8]"),
        (cut(((0, -1), (8, 8))), "the offset of a chunk is -1, but must be at least 0"),
        (cut(((0, 0), (-8, -8))), "the shape of a chunk is -8, but must be at least 0"),
        (cut(((0, 0), (8, True))), "the shape of a chunk is (8, True), but must be whole numbers"),
        (Stored((-8, -8), "float32", ()), "shape is -8, but must be at least 0"),
        (Stored(("8", 8), "float32", ()), "shape is ('8', 8), but must be whole numbers"),  # type: ignore[arg-type]
        (Stored((2**70,), "float32", ()), "shape is 1180591620717411303424, but must be at most"),
        (
            Stored((2**30, 2**30), "float32", (StoredChunk(0, (0, 0), (2**30, 2**30)),)),
            "bytes of them lie in part 0, which has",
        ),
        (Stored((8, 8), "load", (StoredChunk(0, (0, 0), (8, 8)),)), "dtype is 'load', which is none"),
        (Stored((8, 8), "float" + "9" * 30, (StoredChunk(0, (0, 0), (8, 8)),)), "which is none"),
        (Stored((8, 8), 32, (StoredChunk(0, (0, 0), (8, 8)),)), "dtype is 32, which is none"),  # type: ignore[arg-type]
    ],
)
def test_a_tensor_that_cannot_be_is_refused(folder: Path, stored: Stored, says: str) -> None:
    tensors = Manifest.read(folder / "step-2").tensors
    reseal(folder / "step-2", tensors=tensors | {"model/layer.weight": stored})
    reason = reason_for(folder)
    assert reason.startswith("manifest.json does not describe a checkpoint (tensors: ")
    assert says in reason
    with pytest.raises(CheckpointError, match=r"step-2 cannot be used: manifest\.json "):
        inspect(folder / "step-2")


@pytest.mark.parametrize(
    ("chunks", "overlap"),
    [
        ([((0, 0), (4, 8)), ((4, 0), (4, 8))], False),
        ([((0, 0), (8, 3)), ((0, 3), (8, 5))], False),
        ([((0, 0), (4, 4)), ((4, 4), (4, 4)), ((0, 4), (4, 4)), ((4, 0), (4, 4))], False),
        ([((0, 0), (8, 8)), ((8, 0), (0, 8)), ((3, 3), (0, 0))], False),
        ([((0, 0), (4, 8)), ((0, 0), (4, 8))], True),
        ([((0, 0), (4, 8)), ((3, 0), (4, 8))], True),
        ([((0, 0), (8, 4)), ((4, 0), (4, 8))], True),
        ([((0, 0), (4, 4)), ((4, 4), (4, 4)), ((0, 4), (4, 4)), ((4, 3), (4, 4))], True),
    ],
)
def test_boxes_that_overlap_are_refused(chunks: list[Any], overlap: bool) -> None:
    if not overlap:
        check_tensors({"one": cut(*chunks)}, dict.fromkeys(range(9), 10**6))
        return
    with pytest.raises(DocumentError, match="two of its chunks overlap at"):
        check_tensors({"one": cut(*chunks)}, dict.fromkeys(range(9), 10**6))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"position": {"epoch": 0, "step": 2, "number": 3}}, "position: number is 3, and the checkpoint is of step 2"),
        ({"position": {"step": 2, "number": 2}}, "position: epoch is missing"),
        ({"position": {"epoch": 0, "number": 2}}, "position: step is missing"),
        ({"position": {"epoch": 0, "step": 2, "zzz": 1}}, "position: nothing in one is called 'zzz'"),
        ({"position": {"epoch": 0, "step": 10**30}}, "position: step is a number of 31 digits, but must be at most"),
        ({"position": {"epoch": 0, "step": 0, "number": 2, "first_number": 3}}, "position: first_number is 3, which is behind"),
        ({"position": {"epoch": 0, "step": 3, "number": 2}}, "position: step is 3, which is behind its number, 2"),
        ({"position": {"epoch": 0, "step": 2, "phase": 7}, "meta": {"stream": False}}, "position: phase is 7, and a Task has"),
        ({"aliases": {"5": "model/layer.weight"}}, "aliases: '5' is no tensor of a model"),
        *(({"meta": {name: value}}, f"meta: {name} is ") for name, value in (
            ("samples", "abc"), ("samples", None), ("samples", -1), ("batch_size", "16"), ("batch_size", 0), ("frozen", 5),
            ("frozen", ["a", 5]), ("frozen", "abc"), ("shards", None), ("shards", 10**9), ("horizon", "x"), ("horizon", 10**30),
            ("workers", -3), ("seed", -1), ("seed", 1.5), ("strategy", 5), ("mesh", None), ("task", 5), ("exactness", []),
            ("stream", 1), ("epoch_total", 5), ("epoch_total", "xyz"), ("epoch_weight", "0x1p99999"),
        )),
    ],
)  # fmt: skip
def test_a_position_and_facts_that_cannot_be_are_refused(
    folder: Path, changes: dict[str, Any], says: str
) -> None:
    reseal(folder / "step-2", **changes)
    assert reason_for(folder).startswith(f"manifest.json does not describe a checkpoint ({says}")


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        (Stored((64,), "float32", (StoredChunk(0, (0,), (64,)),)), "holds another model/layer.weight than"),
        (Stored((8, 8), "int32", (StoredChunk(0, (0, 0), (8, 8)),)), "holds another model/layer.weight than"),
        (
            Stored((8, 8), "float31", (StoredChunk(0, (0, 0), (8, 8)),)),
            "the type float31 of a tensor is not known",
        ),
    ],
)
def test_a_tensor_that_is_another_is_refused(folder: Path, stored: Stored, says: str) -> None:
    tensors = Manifest.read(folder / "step-2").tensors
    reseal(folder / "step-2", tensors=tensors | {"model/layer.weight": stored})
    assert says in reason_for(folder)
    inspect(folder)
    with pytest.raises(CheckpointError) as caught:
        inspect(folder, verify=True)
    assert f"{folder / 'step-2'} is damaged: " in str(caught.value)
    assert says in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        export(folder / "step-2", folder / "model.safetensors")
    assert f"{folder / 'step-2'} cannot be used: " in str(caught.value)
    assert says in str(caught.value)


def test_names_that_lead_elsewhere_are_refused(folder: Path) -> None:
    manifest = Manifest.read(folder / "step-2")
    files = {"../step-1/part-0.safetensors": manifest.files[PART], EXTRA_STATE: manifest.files[EXTRA_STATE]}
    reseal(folder / "step-2", files=files)
    assert reason_for(folder) == (
        "manifest.json does not describe a checkpoint (the files are not those of a checkpoint)"
    )


@pytest.mark.parametrize("other", [1, 3])
def test_another_format_is_named(folder: Path, other: int) -> None:
    dataclasses.replace(Manifest.read(folder / "step-2"), format=other).write(folder / "step-2")
    assert reason_for(folder) == f"manifest.json has format {other}, and this version reads only 2"

"""What `paceline inspect` shows of a checkpoint, and what it says of one that is none."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import load, weights_sha256
from paceline.checkpoint.manifest import _digest
from paceline.cli.inspect import inspect
from paceline.errors import CheckpointError
from tests.checkpoints import Checkpoints
from tests.patience import HANG_S
from tests.unit.checkpoint.states import EXTRA_STATE, MANIFEST, PART, run_state


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    weight = torch.zeros(100, 100)
    model = {
        "embed": weight,
        "head": weight,
        **{f"bias{number}": torch.zeros(number) for number in range(12)},
    }
    for step in (1, 2):
        Checkpoints(tmp_path / "checkpoints").save(step, run_state(step) | {"model": model})
    return tmp_path


def test_a_run_shows_its_newest(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(run_folder)
    shown = capsys.readouterr().out
    assert f"{run_folder / 'checkpoints' / 'step-2'}: epoch 0, step 2" in shown
    assert "task digits, seed 3, shards 4, strategy ddp" in shown
    assert "model: 14 tensors, 20,066 values, 80.3 kB" in shown
    assert "model/embed" in shown
    assert "100x100" in shown
    assert "model/head is tied to model/embed" in shown
    assert "and 5 smaller tensors (--all shows them)" in shown
    assert "of full length" in shown
    inspect(run_folder, everything=True, verify=True)
    shown = capsys.readouterr().out
    assert "smaller tensors" not in shown
    assert shown.count("sha256 fits") == 2


def test_as_json(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(run_folder / "checkpoints" / "step-1", everything=True, json_=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["strategy"], told["shards"], told["whole"], told["verified"]) == (
        1, "ddp", 4, True, False
    )  # fmt: skip
    assert told["tensors"]["model/embed"] == {
        "shape": [100, 100], "dtype": "float32", "bytes": 40_000, "parts": [0]
    }  # fmt: skip
    assert told["tensor_count"] == len(told["tensors"]) == 15
    assert set(told["files"]) == {PART, EXTRA_STATE}
    assert told["weights_sha256"] == weights_sha256(
        load(run_folder / "checkpoints" / "step-1").state["model"]
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (PART, "is damaged: it needs 1 part and has 0: part-0.safetensors is missing. Use"),
        (EXTRA_STATE, "is damaged: extra_state.pt is missing. Use"),
        (MANIFEST, "cannot be used: manifest.json is missing. Use"),
    ],
)
def test_a_missing_file(run_folder: Path, name: str, says: str) -> None:
    path = run_folder / "checkpoints" / "step-2"
    (path / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        inspect(path)
    assert f"{path} {says}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_changed_byte_is_found_when_asked_for(run_folder: Path) -> None:
    path = run_folder / "checkpoints" / "step-2" / PART
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    inspect(run_folder)
    with pytest.raises(CheckpointError, match=r"is damaged: part-0\.safetensors: sha256 differs\. Use"):
        inspect(run_folder, verify=True)


def test_a_damaged_manifest(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_folder / "checkpoints" / "step-2"
    (path / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match=r"cannot be used: manifest\.json: sha256 differs"):
        inspect(path)
    with pytest.raises(CheckpointError, match=r"step-2 cannot be used: manifest\.json: sha256 differs\. Use"):
        inspect(run_folder)
    shown = capsys.readouterr().out
    assert f"passed over {path}: manifest.json: sha256 differs" in shown
    assert f"{run_folder / 'checkpoints' / 'step-1'}: epoch 0, step 1" in shown
    with pytest.raises(CheckpointError, match="step-2 cannot be used"):
        inspect(run_folder, json_=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["passed_over"]) == (1, {str(path): "manifest.json: sha256 differs"})
    inspect(run_folder / "checkpoints" / "step-1")


def test_one_that_holds_no_weights(run_folder: Path) -> None:
    path = run_folder / "checkpoints" / "step-2"
    body = json.loads((path / MANIFEST).read_text())
    del body["sha256"]
    body["weights_sha256"] = hashlib.sha256().hexdigest()
    (path / MANIFEST).write_text(json.dumps(body | {"sha256": _digest(body)}))
    with pytest.raises(CheckpointError, match="the hash of nothing: no weights were hashed") as caught:
        inspect(path)
    assert f"{path} cannot be used: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nonsense(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        inspect(tmp_path / "nowhere")
    with pytest.raises(
        CheckpointError, match=r"holds no checkpoint that can be read\. Give the folder of a run"
    ):
        inspect(tmp_path)


def test_it_loads_no_torch() -> None:
    code = "import sys, paceline.cli.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=HANG_S).returncode == 0

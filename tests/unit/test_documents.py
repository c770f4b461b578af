"""What lies in a run folder is read only if it is what it must be, and said in one line if not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import documents
from paceline.checkpoint.inspection import inspect
from paceline.checkpoint.manifest import MANIFEST, Manifest, _digest
from paceline.cli import main as command_line
from paceline.errors import InputError
from paceline.records import ledger
from paceline.records.receipt import Receipt
from paceline.training import folder
from paceline.verify.receipts.audit import audit
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import run_state


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder_instead(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def a_list(path: Path) -> None:
    path.write_text("[]")


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a checkpoint, as far as readers look."""
    Checkpoints(tmp_path / "checkpoints").save(30, run_state(30))
    return tmp_path


SPOILERS = [fifo, folder_instead, deep, a_list, endless]


@pytest.mark.parametrize("spoil", SPOILERS)
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("checkpoints/step-30/manifest.json", inspect),
        ("receipt.json", Receipt.read),
        ("receipt.json", audit),
        ("spec.json", folder.read_spec),
    ],
)
def test_a_document_that_is_none_is_refused_at_once(
    run: Path, name: str, read: Callable[[Path], Any], spoil: Callable[[Path], None]
) -> None:
    spoil(run / name)
    with pytest.raises(InputError) as caught:
        read(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spoil", [fifo, endless])
def test_parts_and_ledgers_that_are_no_files(run: Path, spoil: Callable[[Path], None]) -> None:
    spoil(run / "checkpoints/step-30/extra_state.pt")
    assert "no regular file" in inspect(run, verify_all=True).damage["extra_state.pt"]
    (run / ledger.FOLDER).mkdir()
    spoil(run / ledger.FOLDER / "rank-0-from-0.bin")
    with pytest.raises(InputError, match="no regular file"):
        ledger.read(run / ledger.FOLDER / "rank-0-from-0.bin")


def test_inspect_as_it_is_typed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fifo(run / "checkpoints/step-30/manifest.json")
    assert command_line._command(["inspect", str(run)]) == 2
    assert "manifest.json is no regular file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": -30}, "step"),
        ({"step": 31}, "step"),
        ({"step": "30"}, "step"),
        ({"step": True}, "step"),
        ({"position": {"epoch": -1, "step": 0, "number": 30}}, "position"),
        ({"position": {"epoch": "one", "step": 0, "number": 30}}, "position"),
        ({"position": []}, "position"),
        ({"weights_sha256": ""}, "weights_sha256"),
        ({"weights_sha256": None}, "weights_sha256"),
        (
            {"weights_sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
            "hash of nothing",
        ),
        ({"files": {"part-0.safetensors": {"size": -1, "sha256": "0" * 64}}}, "does not describe"),
        ({"files": {"part-0.safetensors": {"size": "1", "sha256": 3}}}, "does not describe"),
    ],
)
def test_a_manifest_with_a_correct_digest_and_a_field_that_cannot_be(
    run: Path, changes: dict[str, Any], words: str
) -> None:
    path = run / "checkpoints/step-30" / MANIFEST
    body = json.loads(path.read_text()) | changes
    body.pop("sha256")
    path.write_text(json.dumps(body | {"sha256": _digest(body)}))
    with pytest.raises(InputError, match=words):
        Manifest.read(path.parent)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": "many"}, "steps is 'many', but must be a whole number or null"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is nan, but must be a finite number or null"),
        ({"settings": ["lr"]}, "settings"),
        ({"overrides": {"seed": "one"}}, "seed"),
        ({"overrides": 3}, "overrides"),
        ({"threads": 1.5}, "threads"),
        ({"options": []}, "options"),
        ({"options": {"workers": "two"}}, "workers is 'two'"),
        ({"options": {"tuning": {"local_steps": None}}}, "tuning"),
        ({"options": {"strategy": 5}}, "strategy"),
        ({"options": {"elastic": "yes"}}, "elastic"),
    ],
)
def test_a_spec_with_another_type_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(changes))
    with pytest.raises(InputError, match=words):
        folder.read_spec(tmp_path)


def test_what_is_larger_than_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 100)
    assert documents.read_bytes(tmp_path / "big", 100) == b"x" * 100
    with pytest.raises(documents.DocumentError, match="larger than 99 bytes"):
        documents.read_bytes(tmp_path / "big", 99)


def test_a_whole_number_that_no_float_can_hold_is_none() -> None:
    assert documents.fits(10**300, float)
    assert not documents.fits(10**400, float)
    assert documents.fits(10**400, int)

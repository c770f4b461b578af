"""A format is one class in one table: nothing else knows how the tensors of a part lie on the disk."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoint import export, load
from paceline.checkpoint.durable import hash_file
from paceline.checkpoint.file_record import FileRecord
from paceline.checkpoint.formats import FORMATS, WRITTEN
from paceline.checkpoint.inspection import inspect
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import EXTRA_STATE, MANIFEST, assert_same, run_state


class Pickled:
    name, part, error = "torch.save", "tensors-{}.pt", pickle.UnpicklingError

    def holds(self, dtype: torch.dtype) -> bool:
        return True

    def write_part(self, path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
        torch.save(dict(tensors), path)
        return hash_file(path)

    @contextmanager
    def open_part(self, path: Path) -> Iterator[Any]:
        held = torch.load(path, weights_only=True)
        yield SimpleNamespace(get_tensor=held.__getitem__, get_slice=held.__getitem__)


def test_another_format_needs_no_more_than_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, WRITTEN, Pickled())
    path = Checkpoints(tmp_path).save(2, run_state(2))
    assert {file.name for file in path.iterdir()} == {"tensors-0.pt", EXTRA_STATE, MANIFEST}
    assert_same(load(path).state, run_state(2))
    assert inspect(path, verify_all=True).damage == {}
    assert_same(load_file(export(path, tmp_path / "model.safetensors").path), run_state(2)["model"])
    (path / "tensors-0.pt").unlink()
    assert inspect(path).damage == {"tensors-0.pt": "tensors-0.pt is missing"}

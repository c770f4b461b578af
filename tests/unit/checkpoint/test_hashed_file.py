"""What is hashed while it is written is what lies in the file, for tensors of any type, size and layout."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from paceline.checkpoint import hashed_file
from paceline.checkpoint.durable import hash_file
from paceline.checkpoint.hashed_file import HashedFile
from paceline.checkpoint.safetensors_format import write_tensors
from paceline.errors import CheckpointError

TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    made = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(1))
    return made.to(torch.float32).to(dtype)


def written(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    record = write_tensors(path, tensors, {"format": "pt", "a": "b"})
    assert record == hash_file(path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "a": "b"}
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def same(one: Tensor, other: Tensor) -> bool:
    bits = [each.resolve_conj().resolve_neg().contiguous().reshape(-1) for each in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and bits[0].view(torch.uint8).equal(
        bits[1].view(torch.uint8)
    )


@pytest.mark.parametrize("piece", [64, 16 << 20])
def test_every_type_size_and_layout_is_in_the_file(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashed_file, "_PIECE", piece)
    monkeypatch.setattr(hashed_file, "_SMALL", min(piece, 256))
    shared = numbers(torch.float32, 40, 6)
    tensors = {str(dtype): numbers(dtype, 7, 5) for dtype in TYPES} | {
        "empty": numbers(torch.float32, 0, 3),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "large": numbers(torch.int64, 1000),
        "whole": shared,
        "again": shared,
        "turned": shared.t(),
        "part": shared[3:7, 1:2],
        "spread": torch.ones(1, 1).expand(50, 4),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "trained": torch.nn.Parameter(torch.ones(3)),
    }
    found = written(tmp_path / "a", tensors)
    assert found.keys() == tensors.keys()
    assert [name for name, one in tensors.items() if not same(one.detach(), found[name])] == []


def test_a_file_of_nothing_and_equal_files_of_equal_tensors(tmp_path: Path) -> None:
    assert written(tmp_path / "none", {}) == {}
    tensors = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.int64)}
    written(tmp_path / "one", tensors)
    written(tmp_path / "two", dict(reversed(tensors.items())))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_type_that_no_file_holds_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"cannot save layer[.]weight: safetensors has no type torch[.]complex128"
    ):
        write_tensors(tmp_path / "a", {"model/layer.weight": torch.ones(2, dtype=torch.complex128)}, {})


def filled(file: HashedFile) -> None:
    with file:
        file.write_tensor(torch.ones(10000))
        file.record()


def test_an_error_of_the_disk_comes_out_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed_file, "_PIECE", 64)
    monkeypatch.setattr(hashed_file, "_SMALL", 64)
    before = threading.active_count()
    with pytest.raises(OSError, match="No space left"):
        filled(HashedFile(Path("/dev/full")))
    assert threading.active_count() == before

"""Predictions as a file, written as they are made: it appears under its name when it is whole, and not before."""

from __future__ import annotations

import glob
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InputError

NPY, SAFETENSORS = ".npy", ".safetensors"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As the safetensors format names them."""


def check_path(path: Path) -> None:
    """Raise for a file that predictions cannot be written to."""
    if path.suffix not in (NPY, SAFETENSORS):
        raise InputError(
            f"predictions are written to a file that ends in {SAFETENSORS} or {NPY} (one tensor), not to {path}."
        )
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file for the predictions.")


class PredictionFile:
    """Rows of named tensors, one after another, each in a file of its own until all are there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[str, BinaryIO] = {}
        self._like: dict[str, Tensor] = {}
        """The first rows, whose type and shape all others have."""
        self._rows = 0

    def add(self, outputs: Mapping[str, Tensor]) -> None:
        """Append the outputs of some samples."""
        if not self._parts:
            self._open(outputs)
        for name, rows in outputs.items():
            if rows.numel():
                self._parts[name].write(rows.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._rows += len(next(iter(outputs.values())))

    def _open(self, outputs: Mapping[str, Tensor]) -> None:
        if self._path.suffix == NPY:
            dtype = next(iter(outputs.values())).dtype
            if len(outputs) > 1 or dtype == torch.bfloat16:
                what = f"the tensors {', '.join(outputs)}" if len(outputs) > 1 else "bfloat16"
                raise InputError(f"a {NPY} file cannot hold {what}. Use a name that ends in {SAFETENSORS}.")
        for name, rows in outputs.items():
            if rows.dtype not in _DTYPES:
                raise InputError(f"predictions of the type {rows.dtype} cannot be written to {self._path}.")
            self._like[name] = rows[:0].clone()
            self._parts[name] = self._part(len(self._parts)).open("w+b")

    def _part(self, number: int | str) -> Path:
        return self._path.with_name(f".{self._path.name}.partial-{os.getpid()}-{number}")

    def commit(self) -> None:
        """Put the parts together under the file's name, in place of what may be there."""
        whole = self._part("whole")
        try:
            with whole.open("wb") as file:
                file.write(self._header())
                for name in self._names():
                    self._parts[name].seek(0)
                    shutil.copyfileobj(self._parts[name], file, 1 << 22)
                file.flush()
                os.fsync(file.fileno())
            whole.replace(self._path)
        finally:
            whole.unlink(missing_ok=True)

    def _names(self) -> list[str]:
        return sorted(self._parts)

    def _header(self) -> bytes:
        shapes = {name: [self._rows, *like.shape[1:]] for name, like in self._like.items()}
        if self._path.suffix == NPY:
            name = self._names()[0]
            about = {
                "descr": np.lib.format.dtype_to_descr(self._like[name].numpy().dtype),
                "fortran_order": False,
                "shape": tuple(shapes[name]),
            }
            text = repr(about)
            text += " " * (-(len(text) + 11) % 64) + "\n"
            return np.lib.format.magic(1, 0) + struct.pack("<H", len(text)) + text.encode()
        header, end = {}, 0
        for name in self._names():
            start, end = end, end + self._parts[name].tell()
            header[name] = {
                "dtype": _DTYPES[self._like[name].dtype],
                "shape": shapes[name],
                "data_offsets": [start, end],
            }
        text = json.dumps(header)
        text += " " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text.encode()

    def close(self) -> None:
        """Remove the parts."""
        with ExitStack() as stack:
            for number, part in enumerate(self._parts.values()):
                stack.callback(self._part(number).unlink, missing_ok=True)
                stack.callback(part.close)
        self._parts = {}


@contextmanager
def prediction_file(path: Path) -> Iterator[PredictionFile]:
    """Open a file for predictions; what an attempt before this one has left is removed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{glob.escape(path.name)}.partial-*"):
            left.unlink(missing_ok=True)
        file = PredictionFile(path)
        try:
            yield file
        finally:
            file.close()
    except OSError as error:
        raise InputError(
            f"the predictions cannot be written to {path}: {error.strerror or error}."
        ) from error

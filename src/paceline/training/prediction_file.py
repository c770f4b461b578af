"""Predictions as a file, written as they are made: it appears under its name when it is whole, and not before."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.durable import remove
from paceline.checkpoint.leftovers import beside, sweep
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

    def __init__(self, path: Path, folder: Path) -> None:
        self._path, self._folder = path, folder
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
            self._parts[name] = (self._folder / str(len(self._parts))).open("w+b")

    def commit(self) -> None:
        """Put the parts together under the file's name, in place of what may be there."""
        whole = self._folder / "whole"
        with whole.open("wb") as file:
            file.write(self._header())
            for name in self._names():
                self._parts[name].seek(0)
                shutil.copyfileobj(self._parts[name], file, 1 << 22)
            file.flush()
            os.fsync(file.fileno())
        whole.replace(self._path)

    def _names(self) -> list[str]:
        return sorted(self._parts)

    def _header(self) -> bytes:
        shapes = {name: [self._rows, *like.shape[1:]] for name, like in self._like.items()}
        if self._path.suffix == NPY:
            name = self._names()[0]
            about = np.lib.format.header_data_from_array_1_0(self._like[name].numpy())
            written = io.BytesIO()
            np.lib.format.write_array_header_1_0(
                written, {**about, "fortran_order": False, "shape": tuple(shapes[name])}
            )
            return written.getvalue()
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
        """Close the parts."""
        for part in self._parts.values():
            part.close()
        self._parts = {}


@contextmanager
def prediction_file(path: Path) -> Iterator[PredictionFile]:
    """Open a file for predictions; what an attempt that died has left is removed, and nothing of one that lives."""
    folder = beside(path, "partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(folder)
        folder.mkdir()
        file = PredictionFile(path, folder)
        try:
            sweep(path.parent, re.escape(path.name), now=folder.stat().st_mtime, writing=folder)
            yield file
        finally:
            file.close()
            remove(folder)
    except OSError as error:
        raise InputError(
            f"the predictions cannot be written to {path}: {error.strerror or error}."
        ) from error

"""Tar files of samples, as WebDataset writes them: members of one name with different endings, side by side, make a sample."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.parts import Parts
from paceline.errors import InputError

KEY = "__key__"
Decode = Callable[[dict[str, Any]], Any]
_PICKLED = ("pth", "pt", "pyd", "pkl", "pickle", "joblib")


def _array(content: bytes) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False)


def _tensors(content: bytes) -> Any:
    from safetensors.torch import load

    return load(content)


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "json": json.loads,
    "txt": bytes.decode,
    "text": bytes.decode,
    "cls": int,
    "cls2": int,
    "index": int,
    "npy": _array,
    "safetensors": _tensors,
}


class TarFiles(Parts):
    """The samples of tar files: dicts of an ending to what the member holds, and `__key__`, the name.

    json, txt, cls, npy and safetensors are decoded; everything else is bytes, for `decode`, a function of the sample. The samples
    of each file are counted beforehand by their names, unless an epoch has `samples_per_epoch`.
    """

    def __init__(
        self,
        paths: Iterable[str | Path],
        *,
        decode: Decode | None = None,
        samples_per_epoch: int | None = None,
        shuffle: bool = True,
        buffer: int = 1,
    ) -> None:
        super().__init__(
            [str(path) for path in paths],
            partial(_samples, decode=decode),
            lengths=_count if samples_per_epoch is None else None,
            samples_per_epoch=samples_per_epoch,
            shuffle=shuffle,
            buffer=buffer,
        )


def _count(path: str) -> int:
    found, before = 0, None
    with tarfile.open(path) as tar:
        for member in tar:
            if (place := _place(member)) is not None:
                found += place[0] != before
                before = place[0]
    return found


def _samples(path: str, *, decode: Decode | None) -> Iterator[Any]:
    sample: dict[str, Any] = {}
    with tarfile.open(path, "r|*") as tar:
        for member in tar:
            place = _place(member)
            if place is None:
                continue
            key, ending = place
            if sample and sample[KEY] != key:
                yield sample if decode is None else decode(sample)
                sample = {}
            sample[KEY] = key
            file = tar.extractfile(member)
            if file is not None:
                sample[ending] = _decoded(path, member.name, ending, file.read())
    if sample:
        yield sample if decode is None else decode(sample)


def _place(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return the name of a member's sample and its ending, which begins at the first dot; None for folders and links."""
    folder, slash, name = member.name.rpartition("/")
    stem, dot, ending = name.partition(".")
    if not member.isfile() or not stem or not dot:
        return None
    return f"{folder}{slash}{stem}", ending.lower()


def _decoded(path: str, name: str, ending: str, content: bytes) -> Any:
    kind = ending.rpartition(".")[2]
    if kind in _PICKLED:
        raise InputError(
            f"{name} in {path} is a pickle, which runs whatever code it holds when it is read, so it is refused. Write it as "
            "npy, json or safetensors."
        )
    try:
        return _DECODERS[kind](content) if kind in _DECODERS else content
    except ValueError as error:
        raise InputError(f"{name} in {path} is no {kind}: {error}.") from error

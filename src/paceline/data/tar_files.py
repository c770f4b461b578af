"""Tar files of samples, as WebDataset writes them: members of one name with different endings, side by side, make a sample."""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tarfile import EOFHeaderError, HeaderError, ReadError  # type: ignore[attr-defined]
from typing import Any, Self

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


class _Member(tarfile.TarInfo):
    """A member of a file that must be whole: tarfile takes a damaged header, or none, for the end of the file."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        """Read the next one; raise where there is neither one nor the mark of the end."""
        try:
            return super().fromtarfile(tar)
        except EOFHeaderError:
            raise
        except HeaderError as error:
            raise ReadError(f"{error} at byte {tar.offset}") from None


def _members(path: str, *, read: bool) -> Iterator[tuple[tuple[str, str], str, bytes]]:
    """Yield sample and ending, name and content of each member, the content where it is to be read."""
    try:
        with tarfile.open(path, "r|*" if read else "r", tarinfo=_Member) as tar:
            for member in tar:
                if (place := _place(member)) is not None:
                    file = tar.extractfile(member) if read else None
                    yield place, member.name, b"" if file is None else file.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{path} is no tar file, or is not whole ({reason}). Fetch or write it again."
        ) from error


def _count(path: str) -> int:
    found, before = 0, None
    for (key, _), *_ in _members(path, read=False):
        found += key != before
        before = key
    return found


def _samples(path: str, *, decode: Decode | None) -> Iterator[Any]:
    sample: dict[str, Any] = {}
    for (key, ending), name, content in _members(path, read=True):
        if sample and sample[KEY] != key:
            yield sample if decode is None else decode(sample)
            sample = {}
        if ending == KEY:
            raise InputError(
                f"{name} in {path} ends in {KEY}, which is the name of a sample. Give it another ending."
            )
        if ending in sample:
            raise InputError(
                f"{name} in {path}: its sample has a member .{ending} already. Write the file again, each sample's members once."
            )
        sample[KEY] = key
        sample[ending] = _decoded(path, name, ending, content)
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
    except Exception as error:  # whatever numpy and safetensors raise for content that is none
        raise InputError(f"{name} in {path} is no {kind}: {error}.") from error

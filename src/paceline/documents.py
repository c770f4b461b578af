"""Reads what lies in a run folder: regular files of bounded size, JSON whose fields have the types they must. Imports no torch.

Nothing in a folder is trusted to be what its name says. A FIFO would keep a reader waiting for ever, a device or a
huge file would fill the memory, and a field of another type would end in a traceback somewhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import stat
import types
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from paceline.errors import InputError
from paceline.ranges import Range

MOST = 2**28
"""Bytes of a document: a manifest of a million tensors is about 200 MB."""


HASH_OF_NOTHING = hashlib.sha256().hexdigest()


class DocumentError(ValueError):
    """A file that is there and is not what it must be; the message goes on from the file's name."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; raise DocumentError unless it is a regular one, OSError where it cannot be opened."""
    # Without waiting: the other end of a FIFO may never come.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DocumentError("is no regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """Return what a regular file holds; raise DocumentError if that is more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DocumentError(f"is larger than {most} bytes")
    return content


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise DocumentError if there is anything else."""
    try:
        found = json.loads(read_bytes(path))
    except DocumentError:
        raise
    except (ValueError, RecursionError):
        raise DocumentError("is not valid JSON") from None
    if not isinstance(found, dict):
        raise DocumentError("is not a JSON object")
    return found


def check_fields(document: Mapping[str, Any], kind: type, *, where: str = "") -> None:
    """Raise DocumentError if a field that a dataclass has too is not of the type it has there.

    A field that is missing, and one that the dataclass does not have, is for the caller to judge.
    """
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in document and not fits(document[field.name], hints[field.name]):
            raise DocumentError(
                f"{where}{field.name} is {shown(document[field.name])}, but must be {_name(hints[field.name])}"
            )


def number(what: str, value: Any, within: Range) -> Any:
    """Return a number out of a document; raise DocumentError unless it lies in a range, as an option's must."""
    try:
        return within.read(what, value if fits(value, float) else Verbatim(shown(value)))
    except InputError as error:
        raise DocumentError(str(error).removesuffix(".")) from None


class Verbatim(str):
    """Text that a message shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value out of JSON can stand for a type."""
    if hint is Any or get_args(hint):
        return hint is Any or _fits_parts(value, get_origin(hint), get_args(hint))
    if hint in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole:
            return hint is int or abs(value) < 2**1023  # what is larger may be too large for a float
        return hint is float and isinstance(value, float) and math.isfinite(value)
    if hint is Path:
        return isinstance(value, (str, Path)) and "\0" not in str(value)
    if dataclasses.is_dataclass(hint):
        return isinstance(value, dict) and _all_fit(value, hint)
    return value is None if hint is None else isinstance(value, hint)


def _fits_parts(value: Any, origin: Any, parts: tuple[Any, ...]) -> bool:
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin in (tuple, list):
        return isinstance(value, (list, tuple)) and all(fits(one, parts[0]) for one in value)
    # The keys of a JSON object are text; a mapping by numbers is read from that.
    return isinstance(value, dict) and all(fits(one, parts[1]) for one in value.values())


def is_sha256(value: Any) -> bool:
    """Return whether a value is a sha256 in hexadecimal digits."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def check_weights_sha256(value: Any) -> None:
    """Raise DocumentError unless a value is the hash of some weights: the hash of none agrees with any training."""
    if not is_sha256(value):
        raise DocumentError(f"weights_sha256 is {shown(value)}, but must be 64 hexadecimal digits")
    if value == HASH_OF_NOTHING:
        raise DocumentError(f"weights_sha256 is {value[:8]}..., the hash of nothing: no weights were hashed")


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: dataclasses as objects, and null for a number that is not finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown(value: Any) -> str:
    """Return a value for a message, however long it is."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _all_fit(value: Mapping[str, Any], kind: Any) -> bool:
    hints = get_type_hints(kind)
    return all(fits(one, hints[name]) for name, one in value.items() if name in hints)


def _name(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_name(part) for part in get_args(hint))
    if hint is type(None):
        return "null"
    if get_origin(hint) in (list, tuple):
        return "a list"
    return {
        int: "a whole number",
        float: "a finite number",
        str: "text",
        bool: "true or false",
        Path: "a path",
    }.get(hint, "an object" if not isinstance(hint, type) else f"a {hint.__name__}")

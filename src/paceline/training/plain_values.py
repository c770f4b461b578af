"""Descriptions of values, to compare them across processes: plain ones as they are, others by a word and a mark.

Whatever a value does when it is looked at, describing it neither raises nor goes on for ever.
"""

from __future__ import annotations

import enum
import hashlib
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from paceline.training.digests import array_digest, code_digest, digest, is_array
from paceline.training.script import name_across
from paceline.training.task_folder import is_users

_DEEPEST, _LONGEST, _MOST = 12, 1000, 20_000
"""How deep a value is looked into, how long a list and how many parts in all are compared part by part."""
_LONG_TEXT, _LONGEST_NUMBER = 10_000, 10_000
"""Characters of a text and bits of a number, beyond which a mark stands for it."""
_HASHED = 16 << 20
"""Bytes of arrays, long texts and sets that are read of one value; of what is beyond that the size is compared."""
_MEMBER = 64
"""Bytes that a member of a set counts as, at least."""
_RECORDS = (("argparse", "Namespace"), ("types", "SimpleNamespace"))


@dataclass(frozen=True)
class Word:
    """Stands for a value that is none of the plain ones: what it is called, and a mark that tells it from its like."""

    text: str
    mark: str = ""

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Many(Word):
    """Stands for what has parts that can be changed, and is not compared part by part: a set, a tensor, a very long list."""

    __repr__ = Word.__repr__


@dataclass(frozen=True)
class Record:
    """An object by its attributes."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"


OTHER = Word("an object")
UNSEEN = Word("what was not looked at")
ABSENT = Word("absent")
EMPTY_SET = "set()"
_AROUND = {**dict.fromkeys((staticmethod, classmethod, MethodType), "__func__"), property: "fget"}


@dataclass
class _Left:
    """What may still be looked at of one value."""

    parts: int = _MOST
    bytes: int = _HASHED
    path: set[int] = field(default_factory=set)
    """The containers that this one is in."""

    def takes(self, size: int) -> bool:
        """Return whether so many bytes may still be read, and count them."""
        if size > self.bytes:
            return False
        self.bytes -= size
        return True


def plain(value: Any) -> Any:
    """Return a description of a value, OTHER where there is none; equal ones have equal descriptions in every process."""
    return _described(value, _DEEPEST, _Left())


def _described(value: Any, depth: int, left: _Left) -> Any:
    left.parts -= 1
    if depth < 0 or left.parts < 0:
        return OTHER if depth < 0 else UNSEEN
    is_again = id(value) in left.path
    left.path.add(id(value))
    try:
        single = _single(value, depth, left)
        if single is OTHER:
            single = Word("itself") if is_again else _of_parts(value, depth - 1, left)
    except Exception:  # noqa: BLE001  (a user's object may raise whatever it likes)
        return OTHER
    finally:
        if not is_again:
            left.path.discard(id(value))
    return single


def _single(value: Any, depth: int, left: _Left) -> Any:
    """Describe what has no parts; never ask the value itself what it is, which may raise."""
    kind = type(value)
    if value is None or kind in (bool, Word, Many, Record):
        return value
    describe = next((one for base, one in _SINGLE.items() if issubclass(kind, base)), None)
    return _library(value, kind, depth, left) if describe is None else describe(value, left)


def _number(value: Any, _left: _Left) -> Any:
    number = int.__int__(value)
    large = number.bit_length() > _LONGEST_NUMBER
    return Word("a very large number", digest(hex(number))) if large else number


def _text(value: Any, left: _Left) -> Any:
    text: Any = str.__str__(value) if isinstance(value, str) else memoryview(value)
    if len(text) <= _LONG_TEXT:
        return text if isinstance(text, str) else bytes(text)
    said = f"a text of {len(text)} characters" if isinstance(text, str) else f"{len(text)} bytes"
    return Word(said, digest(text) if left.takes(len(text)) else "")


_SINGLE: dict[type, Callable[[Any, _Left], Any]] = {
    enum.Enum: lambda value, _: Word(f"{type(value).__qualname__}.{value.name}"),
    int: _number,
    float: lambda value, _: float.__float__(value),
    str: _text,
    **dict.fromkeys((bytes, bytearray), _text),
    PurePath: lambda value, _: Word(f"{type(value).__name__}({str(value)!r})"),
    complex: lambda value, _: Word(repr(complex.__add__(value, 0))),
    type: lambda value, _: Word(value.__qualname__, name_across(value.__module__)),
}
"""How values of these types are described, in this order: a member of an enumeration may be a number, too."""


def _library(value: Any, kind: type, depth: int, left: _Left) -> Any:
    """Describe functions, and what is of torch or numpy."""
    home = kind.__module__.partition(".")[0]
    if kind is FunctionType:
        return function_word(value, lambda part: _described(part, depth - 1, left))
    if kind is BuiltinFunctionType:
        return Word(value.__qualname__, str(value.__module__))
    if home == "torch" and kind.__name__ in ("dtype", "device", "layout", "memory_format"):
        return Word(str(value))
    if home not in ("torch", "numpy"):
        return OTHER
    if is_array(value):
        text, size = f"a {kind.__name__} of shape {tuple(value.shape)}, {value.dtype}", int(value.nbytes)
        return Many(text, array_digest(value) if left.takes(size) else "")
    return plain(value.item()) if home == "numpy" and getattr(value, "shape", None) == () else OTHER


def function_word(function: FunctionType, described: Any = plain) -> Word:
    """Describe a function by its name, its code and what it has bound."""
    bound = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # it is empty yet
            continue
        # A table that a function keeps to itself is its own affair: mostly a cache.
        kept = (bool, int, float, str, tuple, FunctionType, partial)
        bound += [held] if type(held) in kept or issubclass(type(held), type) else []
    name = function.__qualname__
    name = "<lambda>" if name.endswith("<lambda>") else name  # wherever it was written
    return Word(name, digest(code_digest(function.__code__) + whole([described(one) for one in bound])))


def _of_parts(value: Any, depth: int, left: _Left) -> Any:
    kind = type(value)
    if kind in _AROUND:
        return _described(getattr(value, _AROUND[kind]), depth, left)
    if kind is partial:
        parts = [_described(one, depth, left) for one in (value.func, value.args, value.keywords)]
        return Word(f"partial({', '.join(map(repr, parts))})", digest(whole(parts)))
    value, kind = (dict(value), dict) if kind is MappingProxyType else (value, kind)
    base = next((one for one in (list, tuple, deque, set, frozenset, dict) if issubclass(kind, one)), None)
    if base is None:
        return _object(value, kind, depth, left)
    if base is dict:
        return _table(value, depth, left)
    # The type's own ways: those of a class that is made of it may raise.
    inside, length = base.__iter__(value), base.__len__(value)
    if base in (set, frozenset):
        return _unordered("set", inside, length, depth, left)
    return _list(inside, length, depth, left)


def _unordered(kind: str, parts: Any, length: int, depth: int, left: _Left) -> Any:
    """Describe a set, or all items of a long table: in every order alike, so no part may take from what another may."""
    if not left.takes(_MEMBER * length):
        return Many(f"a {kind} of {length}")
    most, size = left.parts // max(length, 1), left.bytes // max(length, 1) + _MEMBER
    texts = []
    for one in parts:
        if _is_cheap(one, size):
            texts.append(repr(one))
            continue
        share = _Left(most, size, left.path)
        texts.append(whole(_described(one, depth, share)))
        left.parts -= most - max(share.parts, 0)
    texts.sort()
    shown = f"{{{', '.join(texts)}}}" if texts else EMPTY_SET
    return Many(shown if len(shown) <= _LONGEST else f"a {kind} of {length}", digest(shown))


def _is_cheap(value: Any, size: int) -> bool:
    kind = type(value)
    return (
        kind in (float, bool)
        or (kind is int and value.bit_length() <= _MEMBER)
        or (kind is str and len(value) <= size)
        or (kind is tuple and len(value) < _MEMBER and all(_is_cheap(one, size) for one in value))
    )


def _list(parts: Any, length: int, depth: int, left: _Left) -> Any:
    if length <= _LONGEST:
        return [_described(one, depth, left) for one in parts]
    made, total = hashlib.sha256(), 0
    for _, one in zip(range(_MOST), parts, strict=False):
        inside = hashlib.sha256(whole(_described(one, depth, left)).encode("utf-8", "surrogatepass")).digest()
        made.update(inside)
        total += int.from_bytes(inside[:8])
        left.parts += type(one) in (int, float, str, bool)  # these are cheap
    return Many(f"a list of {length}", f"{made.hexdigest()[:16]}/{total:x}")


def _table(value: dict[Any, Any], depth: int, left: _Left) -> Any:
    if dict.__len__(value) > _LONGEST:
        return _unordered("table", dict.items(value), dict.__len__(value), depth, left)
    made: dict[Any, Any] = {}
    for name, one in list(dict.items(value)):
        key = _described(name, depth, left)
        if type(key) not in (str, int, float, bool, bytes, type(None)):
            key = Word(whole(key))
        made[key] = _described(one, depth, left)
    return made


def _object(value: Any, kind: type, depth: int, left: _Left) -> Any:
    """Describe an object of the user's own classes, and one that is made to hold attributes."""
    if issubclass(kind, ModuleType):
        return OTHER
    home = kind.__module__
    fields = type.__getattribute__(kind, "__dict__").get("__dataclass_fields__", {})
    if not (is_users(home) or fields or (home, kind.__name__) in _RECORDS):
        return OTHER
    slots = [one.__dict__.get("__slots__", ()) for one in kind.__mro__]
    held: dict[str, Any] = {}
    for name in chain.from_iterable((one,) if isinstance(one, str) else one for one in slots):
        with suppress(AttributeError):
            held[name] = object.__getattribute__(value, name)
    if "__dict__" not in held:
        with suppress(AttributeError):  # it has slots alone
            held.update(object.__getattribute__(value, "__dict__"))
    # What torch keeps of a model there is weights: they are the training's.
    torch = sys.modules.get("torch")
    is_model = torch is not None and torch.nn.Module in kind.__mro__
    return Record(
        kind.__qualname__,
        {
            name: _described(one, depth, left)
            for name, one in list(held.items())
            if not name.startswith("__") and not (is_model and name.startswith("_"))
        },
    )


def whole(value: Any) -> str:
    """Return all of a description as text, marks included."""
    if isinstance(value, Word):
        return f"{value.text}#{value.mark}" if value.mark else value.text
    if isinstance(value, Record):
        return f"{value.kind}({whole(value.fields)})"
    if isinstance(value, list):
        return f"[{', '.join(map(whole, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{whole(name)}: {whole(one)}' for name, one in value.items())}}}"
    return repr(value)


def is_permuted(one: Any, other: Any) -> bool:
    """Return whether two descriptions have the same in them, in another order."""
    return type(one) is type(other) and sorted(_leaves(one)) == sorted(_leaves(other))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, Record):
        value = value.fields
    if isinstance(value, dict | list):
        for one in value if isinstance(value, list) else (*value, *value.values()):
            yield from _leaves(one)
    else:  # of a long list the mark of what is in it
        yield f"{value.text}/{value.mark.rpartition('/')[2]}" if isinstance(value, Word) else repr(value)


def same(one: Any, other: Any) -> bool:
    """Return whether two descriptions are equal; what is no number equals itself, and what cannot be described its like."""
    if UNSEEN in (one, other) or all(isinstance(part, float) and math.isnan(part) for part in (one, other)):
        return True
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, Record) and isinstance(other, Record):
        return one.kind == other.kind and same(one.fields, other.fields)
    if isinstance(one, Word) and isinstance(other, Word) and one.text == other.text:
        return one.mark == other.mark or not (one.mark and other.mark)
    return bool(one == other)

"""Values as frames: a head of JSON, and the memory of tensors and arrays as it is. Reading a message runs nothing it brings.

What is plain travels by itself; values of a class travel where a `Vocabulary` knows the class, on both sides. Small buffers
follow the head in one frame, since each frame costs some microseconds; large ones are frames of their own, sent and read
without a copy.
"""

from __future__ import annotations

import copyreg
import json
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePath, PurePosixPath
from typing import Any, ClassVar, Protocol
from uuid import UUID

import numpy as np
import torch
from numpy.lib.format import descr_to_dtype, dtype_to_descr
from torch import Tensor, nn

from paceline.compat.json_text import encode
from paceline.compat.tensors import sparse_parts
from paceline.errors import CallRefusedError
from paceline.transport.sealing import LARGEST_HEAD

SMALL = 4096
"""Buffers up to this size follow the head, larger ones have frames of their own."""
DEEPEST = 200
UNREGISTERED = "is not registered, so no call may name it here"
_REQUIRES_GRAD, _PARAMETER = 1, 2
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_DTYPE_NAMES = {value: name for name, value in _DTYPES.items()}
_PLAIN = re.compile(r"torch\.(bool|bfloat16|u?int(8|16|32|64)|float(16|32|64)|float8_\w+|complex(32|64|128))")
_OF_TENSORS = frozenset(one for one in _DTYPE_NAMES if _PLAIN.fullmatch(str(one)))
"""The types of tensors whose values are their memory: a quantized one's are not, and torch cannot look at its memory."""
_NUMERIC = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool})
_ATOMS = frozenset({type(None), bool, float, str})
_WORD = 1 << 63


class UnsendableError(TypeError):
    """A value that has no form on the wire."""


class Vocabulary(Protocol):
    """What may travel beside plain values."""

    def address(self, made_by: Any) -> str | None:
        """Return the name under which the other side knows a class; None where its values may not travel."""

    def find(self, address: str) -> Any:
        """Return the class of that name, or raise CallRefusedError."""

    def write(self, writer: Writer, value: Any) -> dict[str, Any] | None:
        """Return the form of a value that is more than its state, under a tag of capital letters; None for all others."""

    def read(self, tag: str, payload: Any) -> Any:
        """Make such a value again."""


class Buffer(Protocol):
    """The content of one frame that has arrived."""

    size: int

    def take(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return its memory, which whoever takes it has alone; once."""


class Writer:
    """Writes the values of one message to one recipient."""

    def __init__(self, vocabulary: Vocabulary, recipient: str, *, lifts: bool = False) -> None:
        """`lifts`: tensors that require gradients are noted in `leaves` and read before all else."""
        self.recipient = recipient
        self.frames: list[memoryview] = []
        self.leaves: list[Tensor] = []
        self.notes: list[Any] = []
        """What the vocabulary wants to remember of this message."""
        self._vocabulary, self._lifts = vocabulary, lifts
        self._lifted: list[Any] = []
        self._small: list[Any] = []
        self._filled = self._depth = 0

    def head(self, value: Any) -> bytes:
        """Return the first frame of a message that holds this value; `frames` follow."""
        tree = self.write(value)
        try:
            text = encode([self._lifted, tree])
        except (ValueError, RecursionError) as error:
            raise UnsendableError(f"{type(error).__name__}: {error}") from None
        size = len(text)
        if size + self._filled > LARGEST_HEAD // 2:
            raise UnsendableError(
                f"the plain values and small tensors of one message come to {(size + self._filled) >> 20} MB; "
                "give them as larger tensors or arrays"
            )
        return b"".join((size.to_bytes(4, "little"), text, *self._small))

    def write(self, value: Any) -> Any:
        """Return a value as JSON knows it."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is int:
            return value if -_WORD <= value < _WORD else {"i": hex(value)}
        if kind is Tensor:
            return self.tensor(value)
        if self._depth == DEEPEST:
            raise UnsendableError(f"it is nested more than {DEEPEST} deep, or holds itself")
        self._depth += 1
        write = _WRITE.get(kind)
        found = write(self, value) if write is not None else self._other(value, kind)
        self._depth -= 1
        return found

    def many(self, values: Any) -> list[Any]:
        """Return several values as JSON knows them."""
        write = self.write
        return [one if type(one) in _ATOMS else write(one) for one in values]

    def add(self, content: memoryview | bytes) -> int:
        """Put a buffer of bytes into the message; returns its place, which `Reader.memory` wants."""
        size = len(content)
        if size <= SMALL:
            self._small.append(content)
            self._filled += size
            return self._filled - size
        self.frames.append(memoryview(content))
        return len(self.frames) - 1

    def tensor(self, value: Tensor) -> dict[str, Any]:
        """Write a tensor; one that requires gradients goes where they are read first, if the message lifts them."""
        if type(value) is Tensor:
            try:
                array = value.numpy()  # refuses whatever is more than numbers in memory of this machine
            except (TypeError, RuntimeError):
                pass
            else:
                if array.flags.c_contiguous:
                    shape, size = array.shape, array.nbytes
                    if size <= SMALL:
                        place = self._filled
                        self._small.append(array)
                        self._filled += size
                    else:
                        place = len(self.frames)
                        self.frames.append(memoryview(array.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
                    return {"T": [_DTYPE_NAMES[value.dtype], list(shape), place, 0]}
        if value.dtype not in _OF_TENSORS:
            raise UnsendableError(f"TypeError: a tensor of the type {value.dtype} has no form on the wire")
        if not (self._lifts and value.requires_grad):
            return {"T": self._tensor(value)}
        self.leaves.append(value)
        self._lifted.append({"T": self._tensor(value)})
        return {"g": len(self.leaves) - 1}

    def _tensor(self, value: Tensor) -> list[Any]:
        flags = _REQUIRES_GRAD * value.requires_grad + _PARAMETER * (type(value) is nn.Parameter)
        source = value.detach() if flags else value
        device = None
        if source.layout is not torch.strided:
            return ["sparse", [self.write(one) for one in _sparse_parts(source)], 0, flags]
        if not source.is_cpu:
            device, source = str(source.device), source.cpu()
        if source.is_conj() or source.is_neg():
            source = source.resolve_conj().resolve_neg()
        order = None
        if not source.is_contiguous():
            order = sorted(range(source.dim()), key=source.stride, reverse=True)
            permuted = source.permute(order)
            order, source = (order, permuted) if permuted.is_contiguous() else (None, source.contiguous())
        place = self.add(_bytes_of(source)) if source.numel() else 0
        found = [_DTYPE_NAMES[source.dtype], list(source.shape), place, flags]
        return found if order is None and device is None else [*found, order, device]

    def _other(self, value: Any, kind: type) -> Any:
        """Write what is known by its class: numbers of numpy's, registered classes and their values, and references."""
        if isinstance(value, np.generic) and not kind.__module__.startswith("numpy."):
            return {"n": [self.write(_description(value.dtype)), self.add(value.tobytes())]}
        if isinstance(value, np.dtype):
            return {"y": self.write(_description(value))}
        special = self._vocabulary.write(self, value)
        if special is not None:
            return special
        if isinstance(value, type):
            return {"c": self._named(value, value)}
        address = self._named(kind, value)
        made = value.__reduce_ex__(2)
        if not isinstance(made, tuple) or not (made[0] is copyreg.__newobj__ or isinstance(made[0], type)):  # type: ignore[attr-defined]
            raise UnsendableError(f"TypeError: {kind.__qualname__} is made by {made!r}, not by its class")
        call, args, state, items, pairs = (*made, None, None, None)[:5]
        if call is copyreg.__newobj__:  # type: ignore[attr-defined]
            call, args, anew = args[0], args[1:], 0
        else:
            anew = 1
        address = address if call is kind else self._named(call, value)
        rest = [state, list(items or ()), [part for pair in pairs or () for part in pair]]
        return {"o": [address, anew, self.many(args), *self.many(rest)]}

    def _named(self, made_by: type, value: Any) -> str:
        """Return the address of a class, or refuse its values."""
        address = self._vocabulary.address(made_by)
        if address is None:
            if value is not made_by and made_by.__reduce_ex__ is object.__reduce_ex__:  # type: ignore[comparison-overlap]
                try:
                    object.__reduce_ex__(value, 2)
                except TypeError as error:  # a socket, a lock, a connection: no decorator would help
                    told = str(error).replace("cannot pickle", "cannot send")
                    raise UnsendableError(f"TypeError: {told}") from None
            raise refusal(f"{made_by.__module__}.{made_by.__qualname__}")
        return address


class Reader:
    """Reads the values of one message."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        content: memoryview,
        frames: Sequence[Buffer],
        lift: Callable[[list[Tensor], list[str | None]], list[Tensor]] | None = None,
    ) -> None:
        """`lift` makes of the tensors that were noted, and their devices, those that stand in the values."""
        size = int.from_bytes(content[:4], "little")
        self._text, self._small = content[4 : 4 + size], content[4 + size :]
        self._frames, self.vocabulary, self._lift = frames, vocabulary, lift
        if lift is not None:
            self._noted: list[Tensor] = []
            self._devices: list[str | None] = []
            self._lifted: list[Tensor] | None = None

    def value(self) -> Any:
        """Return the value, or raise CallRefusedError where the message is not one of ours."""
        try:
            noted, value = _Decoder.read(str(self._text, "ascii"), self)
            if type(noted) is not list:
                raise ValueError("it does not begin with its tensors")
        except CallRefusedError:
            raise
        except (Exception, RecursionError) as error:
            raise CallRefusedError(f"a message could not be read: {type(error).__name__}: {error}") from error
        return value

    def memory(self, size: int, place: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the memory of a large buffer."""
        if not 0 <= place < len(self._frames) or self._frames[place].size != size:
            raise ValueError("a frame is missing or of another size")
        return self._frames[place].take()

    def content(self, size: int, place: int) -> bytearray | memoryview:
        """Return a buffer's bytes, which may be written to."""
        if size > SMALL:
            return memoryview(self.memory(size, place))  # type: ignore[arg-type]
        part = self._small[place : place + size]
        if place < 0 or len(part) != size:
            raise ValueError("a buffer is cut off")
        return bytearray(part)

    def tensor(self, payload: list[Any]) -> Tensor:
        """Make a tensor, in memory of its own that is aligned as torch would have it."""
        name, shape, place, flags, order, device = (*payload, None, None)[:6]
        if name == "sparse":
            return _flagged(_sparse(*shape), flags)
        dtype = _DTYPES[name]
        if dtype not in _OF_TENSORS:
            raise ValueError("a tensor has a type that no tensor may have here")
        size = dtype.itemsize
        for one in shape:
            if type(one) is not int or one < 0:
                raise ValueError("a size is no number")
            size *= one
        if 0 < size <= SMALL:
            found = torch.frombuffer(self.content(size, place), dtype=dtype).clone()
            found = found if len(shape) == 1 else found.view(shape)
        elif size:
            found = torch.frombuffer(self.memory(size, place), dtype=dtype)
            found = found if len(shape) == 1 else found.view(shape)
        else:
            found = torch.empty(shape, dtype=dtype)
        if order is not None:
            back = [0] * len(shape)
            for to, source in enumerate(order):
                back[source] = to
            found = found.permute(back)
        if self._lift is not None and flags & _REQUIRES_GRAD:
            self._noted.append(found)
            self._devices.append(device)
            return found
        return _flagged(moved(found, device), flags)

    def lifted(self, place: int) -> Tensor:
        """Return one of the tensors that require gradients."""
        if self._lift is None:
            raise ValueError("it names a tensor outside of a pass")
        if self._lifted is None:
            self._lifted = self._lift(self._noted, self._devices)
        return self._lifted[place]

    def made(self, payload: list[Any]) -> Any:
        """Make a value of a registered class."""
        address, anew, args, state, items, pairs = payload
        made_by = self.vocabulary.find(address)
        value = made_by(*args) if anew else made_by.__new__(made_by, *args)
        if state is not None:
            if hasattr(value, "__setstate__"):
                value.__setstate__(state)
            else:
                own, slots = state if isinstance(state, tuple) else (state, None)
                vars(value).update(own or {}) if own else None
                for name, one in (slots or {}).items():
                    object.__setattr__(value, name, one)
        if items:
            value.extend(items)
        for key, one in zip(pairs[::2], pairs[1::2], strict=True):
            value[key] = one
        return value


class _Decoder:
    """Reads JSON, and is kept for the next message: it takes longer to make than to read a small one."""

    _idle: ClassVar[deque[_Decoder]] = deque()

    def __init__(self) -> None:
        self.reader: Any = None
        self.decode = json.JSONDecoder(object_hook=self._made).raw_decode

    def _made(self, given: dict[str, Any]) -> Any:
        """Make what one of the text's objects stands for."""
        if len(given) != 1:
            raise ValueError("a value has one tag")
        ((tag, payload),) = given.items()
        read, reader = _READ.get(tag), self.reader
        return reader.vocabulary.read(tag, payload) if read is None else read(reader, payload)

    @classmethod
    def read(cls, text: str, reader: Reader) -> Any:
        """Return what a text says to this reader."""
        try:
            decoder = cls._idle.pop()
        except IndexError:
            decoder = cls()  # of as many threads as read at once, and of calls within a hook
        decoder.reader = reader
        try:
            found, end = decoder.decode(text)
        finally:
            decoder.reader = None
            cls._idle.append(decoder)
        if end != len(text):
            raise ValueError("there is more than one value in it")
        return found


def refusal(name: str) -> CallRefusedError:
    """Return the error that something may not travel."""
    return CallRefusedError(
        f"{name} {UNREGISTERED}. Register it with @remote.service, @remote.function or @remote.allow."
    )


def moved(value: Tensor, device: str | None) -> Tensor:
    """Return a tensor on the device it was on, where this machine has that."""
    if device is None:
        return value
    wanted = torch.device(device)
    there = torch.get_device_module(wanted).device_count() if wanted.type != "cpu" else 0
    return value.to(wanted) if (wanted.index or 0) < there else value


def _flagged(value: Tensor, flags: int) -> Tensor:
    if flags & _PARAMETER:
        return nn.Parameter(value, requires_grad=bool(flags & _REQUIRES_GRAD))
    return value.requires_grad_() if flags & _REQUIRES_GRAD else value


def _bytes_of(value: Tensor) -> memoryview:
    """Return the memory of a tensor without gaps; only numpy's own types can be looked at directly, which is quicker."""
    plain = value.numpy() if value.dtype in _NUMERIC else value.view(-1).view(torch.uint8).numpy()
    return memoryview(plain).cast("B")  # type: ignore[arg-type]


def _description(dtype: np.dtype[Any]) -> Any:
    if dtype.hasobject:
        raise UnsendableError("TypeError: an array of Python objects has no memory of its own")
    return dtype_to_descr(dtype)


def _array(writer: Writer, value: np.ndarray[Any, Any]) -> dict[str, Any]:
    description = writer.write(_description(value.dtype))
    turned = value.flags.f_contiguous and not value.flags.c_contiguous
    source = np.ascontiguousarray(value.T if turned else value)
    place = writer.add(memoryview(source.reshape(-1).view(np.uint8))) if source.nbytes else 0  # type: ignore[arg-type]
    return {"a": [description, list(value.shape), place, turned]}


def _read_array(reader: Reader, payload: list[Any]) -> Any:
    description, shape, place, turned = payload
    dtype = descr_to_dtype(description)
    size = dtype.itemsize
    for one in shape:
        size *= one
    found = np.frombuffer(reader.content(size, place), dtype=dtype)
    return found.reshape(shape[::-1]).T if turned else found.reshape(shape)


def _read_number(reader: Reader, payload: list[Any]) -> Any:
    dtype = descr_to_dtype(payload[0])
    return np.frombuffer(reader.content(dtype.itemsize, payload[1]), dtype=dtype)[0]


def _sparse_parts(value: Tensor) -> tuple[Any, ...]:
    if value.layout is not torch.sparse_coo:
        raise UnsendableError(f"TypeError: a tensor of the layout {value.layout} has no form on the wire")
    return *sparse_parts(value), list(value.shape), value.is_coalesced()


def _sparse(indices: Tensor, values: Tensor, shape: list[int], coalesced: bool) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants(True):  # type: ignore[no-untyped-call]
        made = torch.sparse_coo_tensor(indices, values, shape)
        return made.coalesce() if coalesced else made


def _pairs(writer: Writer, value: dict[Any, Any]) -> list[Any]:
    return writer.many(part for pair in value.items() for part in pair)


def _dictionary(payload: list[Any]) -> dict[Any, Any]:
    return dict(zip(payload[::2], payload[1::2], strict=True))


def _moment(writer: Writer, value: Any) -> list[Any]:
    clock = [value.hour, value.minute, value.second, value.microsecond, writer.write(value.tzinfo)]
    day = [value.year, value.month, value.day] if isinstance(value, datetime) else []
    return [*day, *clock, value.fold]


def _device(name: Any) -> torch.device:
    return torch.device(str(name))


_PATHS = {one.__name__: one for one in (Path, PosixPath, PurePath, PurePosixPath)}
_WRITE: dict[type, Callable[[Writer, Any], Any]] = {
    list: lambda writer, value: writer.many(value),
    tuple: lambda writer, value: {"t": writer.many(value)},
    dict: lambda writer, value: {"d": _pairs(writer, value) if value else []},
    Tensor: Writer.tensor,
    nn.Parameter: Writer.tensor,
    bytes: lambda writer, value: {"b": [len(value), writer.add(value)]},
    bytearray: lambda writer, value: {"ba": [len(value), writer.add(bytes(value))]},
    np.ndarray: _array,
    set: lambda writer, value: {"s": writer.many(value)},
    frozenset: lambda writer, value: {"f": writer.many(value)},
    complex: lambda _, value: {"j": [value.real, value.imag]},
    slice: lambda writer, value: {"sl": writer.many((value.start, value.stop, value.step))},
    range: lambda writer, value: {"r": writer.many((value.start, value.stop, value.step))},
    OrderedDict: lambda writer, value: {"od": _pairs(writer, value)},
    deque: lambda writer, value: {"q": [writer.many(value), value.maxlen]},
    date: lambda _, value: {"day": [value.year, value.month, value.day]},
    datetime: lambda writer, value: {"moment": _moment(writer, value)},
    time: lambda writer, value: {"time": _moment(writer, value)},
    timedelta: lambda _, value: {"span": [value.days, value.seconds, value.microseconds]},
    timezone: lambda writer, value: {"zone": writer.many(value.__getinitargs__())},
    Decimal: lambda _, value: {"decimal": str(value)},
    Fraction: lambda writer, value: {"fraction": writer.many((value.numerator, value.denominator))},
    UUID: lambda _, value: {"uuid": value.hex},
    torch.Size: lambda _, value: {"size": list(value)},
    torch.dtype: lambda _, value: {"dtype": _DTYPE_NAMES[value]},
    torch.device: lambda _, value: {"device": str(value)},
    **{one: lambda _, value: {"path": [type(value).__name__, str(value)]} for one in _PATHS.values()},
}
_READ: dict[str, Callable[[Reader, Any], Any]] = {
    "i": lambda _, payload: int(payload, 16),
    "t": lambda _, payload: tuple(payload),
    "d": lambda _, payload: _dictionary(payload),
    "T": Reader.tensor,
    "g": Reader.lifted,
    "b": lambda reader, payload: bytes(reader.content(*payload)),
    "ba": lambda reader, payload: bytearray(reader.content(*payload)),
    "a": _read_array,
    "n": _read_number,
    "y": lambda _, payload: descr_to_dtype(payload),
    "s": lambda _, payload: set(payload),
    "f": lambda _, payload: frozenset(payload),
    "j": lambda _, payload: complex(*payload),
    "sl": lambda _, payload: slice(*payload),
    "r": lambda _, payload: range(*payload),
    "od": lambda _, payload: OrderedDict(_dictionary(payload)),
    "q": lambda _, payload: deque(*payload),
    "day": lambda _, payload: date(*payload),
    "moment": lambda _, payload: datetime(*payload[:-1], fold=payload[-1]),
    "time": lambda _, payload: time(*payload[:-1], fold=payload[-1]),
    "span": lambda _, payload: timedelta(*payload),
    "zone": lambda _, payload: timezone(*payload),
    "decimal": lambda _, payload: Decimal(payload),
    "fraction": lambda _, payload: Fraction(*payload),
    "uuid": lambda _, payload: UUID(hex=payload),
    "size": lambda _, payload: torch.Size(payload),
    "dtype": lambda _, payload: _DTYPES[payload],
    "device": lambda _, payload: _device(payload),
    "path": lambda _, payload: _PATHS[payload[0]](payload[1]),
    "c": lambda reader, payload: reader.vocabulary.find(payload),
    "o": Reader.made,
}

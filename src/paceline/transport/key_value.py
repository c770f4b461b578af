"""What a key-value store holds, and who waits for what: requests in, answers out, no sockets.

A request names what to do and carries keys and values as bytes; one that asks for keys that are not there yet is answered when
they are. Whoever asked is named by who it is and by the number of its request; `forget` drops the requests of one that is gone.
"""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Asker = tuple[bytes, bytes]
Answer = tuple[Asker, list[bytes]]
OK, ERROR = b"ok", b"error"
LARGEST_TABLE = 1 << 30
"""How many bytes all keys and values together may take."""
MOST_GATHERED = 100_000


class _MalformedError(ValueError):
    """A request that cannot be meant."""


@dataclass(eq=False)
class _Wait:
    """Keys that are asked for, some of which are not there yet."""

    keys: list[bytes]
    form: bytes
    """What is answered: the values (get), the values in one frame (gather), or only that they are there (wait)."""
    askers: dict[Asker, None]
    missing: set[bytes] = field(default_factory=set)


@dataclass
class KeyValueTable:
    """The keys and values of one store."""

    _values: dict[bytes, bytes] = field(default_factory=dict)
    _waiting: defaultdict[bytes, list[_Wait]] = field(default_factory=lambda: defaultdict(list))
    _by_peer: defaultdict[bytes, list[_Wait]] = field(default_factory=lambda: defaultdict(list))
    _gathering: dict[tuple[bytes, int], _Wait] = field(default_factory=dict)
    """What is gathered, by folder and number of keys: all ranks of a group ask for the same, and wait together."""
    _gathered: tuple[tuple[bytes, int], bytes] | None = None
    """What was gathered last, packed once for all of them."""
    _size: int = 0

    def __post_init__(self) -> None:
        self._actions = {
            b"set": self._set,
            b"append": self._append,
            b"add": self._add,
            b"compare_set": self._compare_set,
            b"check": self._check,
            b"delete": self._delete,
            b"count": self._count,
            b"get": self._get,
            b"gather": self._gather,
            b"wait": self._wait,
        }

    def take(self, asker: Asker, request: Sequence[bytes]) -> list[Answer]:
        """Carry out one request, and return the answers that are due now, perhaps to several askers."""
        try:
            action = self._actions.get(request[0]) if request else None
            if action is None:
                raise _MalformedError(
                    f"no such request: {bytes(request[0][:20])!r}" if request else "an empty request"
                )
            return action(asker, list(request[1:]))
        except _MalformedError as error:
            return [(asker, [ERROR, str(error).encode()])]

    def forget(self, peer: bytes) -> None:
        """Drop what somebody who is gone waits for."""
        for wait in dict.fromkeys(self._by_peer.pop(peer, ())):
            for asker in [one for one in wait.askers if one[0] == peer]:
                del wait.askers[asker]
            if not wait.askers:
                self._drop(wait)

    def _drop(self, wait: _Wait) -> None:
        for key in wait.missing:
            waiting = self._waiting[key]
            waiting.remove(wait)
            if not waiting:
                del self._waiting[key]
        if wait.form == b"gather":
            del self._gathering[_folder_of(wait)]

    def _set(self, asker: Asker, parts: list[bytes]) -> list[Answer]:
        if not parts or len(parts) % 2:
            raise _MalformedError("set needs pairs of keys and values")
        values = dict(zip(parts[::2], parts[1::2], strict=True))
        self._check_room(values)
        answers = [answer for key, value in values.items() for answer in self._store(key, value)]
        return [*answers, (asker, [OK])]

    def _append(self, asker: Asker, parts: list[bytes]) -> list[Answer]:
        key, more = _exactly(parts, 2)
        return [*self._store(key, self._values.get(key, b"") + more), (asker, [OK])]

    def _add(self, asker: Asker, parts: list[bytes]) -> list[Answer]:
        key, amount = _exactly(parts, 2)
        try:
            total = str(int(self._values.get(key, b"0")) + int(amount)).encode()
        except ValueError:
            raise _MalformedError("add needs a number, and a key that holds one") from None
        return [*self._store(key, total), (asker, [OK, total])]

    def _compare_set(self, asker: Asker, parts: list[bytes]) -> list[Answer]:
        key, expected, desired = _exactly(parts, 3)
        present = self._values.get(key)
        if (present is None and not expected) or present == expected:
            return [*self._store(key, desired), (asker, [OK, desired])]
        return [(asker, [OK, expected if present is None else present])]

    def _check(self, asker: Asker, parts: list[bytes]) -> list[Answer]:
        return [(asker, [OK, b"1" if all(key in self._values for key in parts) else b"0"])]

    def _delete(self, asker: Asker, parts: list[bytes]) -> list[Answer]:
        (key,) = _exactly(parts, 1)
        value = self._values.pop(key, None)
        self._note_change(key)
        if value is not None:
            self._size -= len(key) + len(value)
        return [(asker, [OK, b"0" if value is None else b"1"])]

    def _count(self, asker: Asker, parts: list[bytes]) -> list[Answer]:
        _exactly(parts, 0)
        return [(asker, [OK, str(len(self._values)).encode()])]

    def _get(self, asker: Asker, parts: list[bytes]) -> list[Answer]:
        return [] if self._waits(asker) else self._when_there(_Wait(parts, b"get", {asker: None}))

    def _wait(self, asker: Asker, parts: list[bytes]) -> list[Answer]:
        return [] if self._waits(asker) else self._when_there(_Wait(parts, b"wait", {asker: None}))

    def _waits(self, asker: Asker) -> bool:
        """Return whether this very request waits already, and was only repeated."""
        return any(asker in wait.askers for wait in self._by_peer.get(asker[0], ()))

    def _gather(self, asker: Asker, parts: list[bytes]) -> list[Answer]:
        """Answer the values of `folder/0` to `folder/count-1` in one frame, which is made once for all who ask for it."""
        folder, number = _exactly(parts, 2)
        if not (number.isdigit() and len(number) < 10) or not 0 < (count := int(number)) <= MOST_GATHERED:
            raise _MalformedError(f"gather needs a folder, and a number from 1 to {MOST_GATHERED}")
        if self._gathered is not None and self._gathered[0] == (folder, count):
            return [(asker, [OK, self._gathered[1]])]
        same = self._gathering.get((folder, count))
        if same is None:
            keys = [b"%b/%d" % (folder, one) for one in range(count)]
            return self._when_there(_Wait(keys, b"gather", {asker: None}))
        if asker not in same.askers:
            same.askers[asker] = None
            self._by_peer[asker[0]].append(same)
        return []

    def _when_there(self, wait: _Wait) -> list[Answer]:
        return self._answers(wait) if self._is_complete(wait) else []

    def _is_complete(self, wait: _Wait) -> bool:
        """Return whether all keys are there now; else wait for those that are not, one deleted meanwhile among them."""
        wait.missing = {key for key in wait.keys if key not in self._values}
        for key in wait.missing:
            self._waiting[key].append(wait)
        if wait.missing:
            for peer, _ in wait.askers:
                self._by_peer[peer].append(wait)
            if wait.form == b"gather":
                self._gathering[_folder_of(wait)] = wait
        return not wait.missing

    def _check_room(self, values: Mapping[bytes, bytes]) -> None:
        """Refuse what does not fit, before any of it is stored: somebody may wait for the first of it."""
        if self._size + sum(self._growth(key, value) for key, value in values.items()) > LARGEST_TABLE:
            raise _MalformedError(f"the store is full: it holds {self._size} bytes")

    def _growth(self, key: bytes, value: bytes) -> int:
        before = self._values.get(key)
        return len(value) + (len(key) if before is None else -len(before))

    def _store(self, key: bytes, value: bytes) -> list[Answer]:
        """Keep a value, and return the answers to those whose last missing key it is."""
        self._check_room({key: value})
        self._size += self._growth(key, value)
        self._values[key] = value
        self._note_change(key)
        answers = []
        for wait in self._waiting.pop(key, ()):
            wait.missing.discard(key)
            if not wait.missing:
                self._release(wait)
                answers += self._when_there(wait)
        return answers

    def _release(self, wait: _Wait) -> None:
        """Take a request off the books of those who made it."""
        self._drop(wait)
        for peer, _ in wait.askers:
            mine = self._by_peer[peer]
            mine.remove(wait)
            if not mine:
                del self._by_peer[peer]

    def _answers(self, wait: _Wait) -> list[Answer]:
        values = [] if wait.form == b"wait" else [self._values[key] for key in wait.keys]
        if wait.form == b"gather":
            values = [pack(values)]
            self._gathered = _folder_of(wait), values[0]
        return [(asker, [OK, *values]) for asker in wait.askers]

    def _note_change(self, key: bytes) -> None:
        if self._gathered is not None and key.rpartition(b"/")[0] == self._gathered[0][0]:
            self._gathered = None


def pack(values: Sequence[bytes]) -> bytes:
    """Write several values as one frame, compressed: addresses of gloo's are alike, and each rank is sent those of all."""
    lengths = struct.pack(f"<I{len(values)}I", len(values), *map(len, values))
    return zlib.compress(lengths + b"".join(values), level=1)


def unpack(frame: bytes) -> list[bytes]:
    """Read them back."""
    frame = zlib.decompress(frame)
    (count,) = struct.unpack_from("<I", frame)
    lengths, at, values = struct.unpack_from(f"<{count}I", frame, 4), 4 + 4 * count, []
    for length in lengths:
        values.append(frame[at : at + length])
        at += length
    return values


def _folder_of(wait: _Wait) -> tuple[bytes, int]:
    return wait.keys[0].rpartition(b"/")[0], len(wait.keys)


def _exactly(parts: list[bytes], count: int) -> list[bytes]:
    if len(parts) != count:
        raise _MalformedError(f"{len(parts)} parts where there should be {count}")
    return parts

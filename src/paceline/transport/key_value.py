"""What a key-value store holds, and who waits for what: requests in, answers out, no sockets.

A request names what to do and carries keys and values as bytes; one that asks for keys that are not there yet is answered when
they are. Whoever asked is named by who it is and by the number of its request; `forget` drops the requests of one that is gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Asker = tuple[bytes, bytes]
Answer = tuple[Asker, list[bytes]]
OK, ERROR = b"ok", b"error"
LARGEST_TABLE = 1 << 30
"""How many bytes all keys and values together may take."""


class _MalformedError(ValueError):
    """A request that cannot be meant."""


@dataclass(eq=False)
class _Wait:
    """A request for keys, some of which are not there yet."""

    asker: Asker
    keys: list[bytes]
    missing: set[bytes]
    values: bool
    """Whether the answer is the values, or only that they are there."""


@dataclass
class KeyValueTable:
    """The keys and values of one store."""

    _values: dict[bytes, bytes] = field(default_factory=dict)
    _waiting: defaultdict[bytes, list[_Wait]] = field(default_factory=lambda: defaultdict(list))
    _by_peer: defaultdict[bytes, list[_Wait]] = field(default_factory=lambda: defaultdict(list))
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
        for wait in self._by_peer.pop(peer, ()):
            for key in wait.missing:
                waiting = self._waiting[key]
                waiting.remove(wait)
                if not waiting:
                    del self._waiting[key]

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
        if value is not None:
            self._size -= len(key) + len(value)
        return [(asker, [OK, b"0" if value is None else b"1"])]

    def _count(self, asker: Asker, parts: list[bytes]) -> list[Answer]:
        _exactly(parts, 0)
        return [(asker, [OK, str(len(self._values)).encode()])]

    def _get(self, asker: Asker, parts: list[bytes]) -> list[Answer]:
        return self._when_there(asker, parts, values=True)

    def _wait(self, asker: Asker, parts: list[bytes]) -> list[Answer]:
        return self._when_there(asker, parts, values=False)

    def _when_there(self, asker: Asker, keys: list[bytes], *, values: bool) -> list[Answer]:
        wait = _Wait(asker, keys, set(), values)
        return [self._answer(wait)] if self._is_complete(wait) else []

    def _is_complete(self, wait: _Wait) -> bool:
        """Return whether all keys are there now; else wait for those that are not, one deleted meanwhile among them."""
        wait.missing = {key for key in wait.keys if key not in self._values}
        for key in wait.missing:
            self._waiting[key].append(wait)
        if wait.missing:
            self._by_peer[wait.asker[0]].append(wait)
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
        answers = []
        for wait in self._waiting.pop(key, ()):
            wait.missing.discard(key)
            if not wait.missing:
                mine = self._by_peer[wait.asker[0]]
                mine.remove(wait)
                if not mine:
                    del self._by_peer[wait.asker[0]]
                if self._is_complete(wait):
                    answers.append(self._answer(wait))
        return answers

    def _answer(self, wait: _Wait) -> Answer:
        return wait.asker, [OK, *(self._values[key] for key in wait.keys)] if wait.values else [OK]


def _exactly(parts: list[bytes], count: int) -> list[bytes]:
    if len(parts) != count:
        raise _MalformedError(f"{len(parts)} parts where there should be {count}")
    return parts

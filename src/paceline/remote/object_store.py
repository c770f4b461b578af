"""Values that stay on this worker for others: each with everyone who holds it; the last that lets go frees it.

torch has such references, too. It frees one under two locks, Python's and its own, and takes them in another order when the
word that frees it comes from a worker: many references in flight, and both sides wait for ever. Nor does it ever free what a
lost worker held.
"""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed.rpc import functions
from torch.futures import Future

from paceline.remote.guard import own
from paceline.remote.message_recipient import begin

Number = tuple[int, int]
"""Names a value among all: the rank of the worker that asked for it, and that worker's count."""
Token = tuple[int, int]
"""Names one hold on a value: the rank of the worker that made it, and that worker's count."""
Hold = tuple[Number, Token]


class _Kept:
    """One value, perhaps still to be made."""

    def __init__(self) -> None:
        self.holders: dict[Token, str] = {}
        self.value: Any = None
        self.made = threading.Event()
        self.ready: Future[None] = Future()


_kept: dict[Number, _Kept] = {}
_early: set[Hold] = set()
"""Holds that were let go of before the word that they exist came."""
_lost: set[str] = set()
_lock = threading.RLock()
"""Little is made under it: wherever Python makes something it may free something else, and run what the user has for that."""


def hold(number: Number, token: Token, holder: str) -> None:
    """Count one more hold on a value, which may still be on its way; a lost worker holds nothing."""
    wanted, fresh = (number, token), _kept.get(number) or _Kept()
    with _lock:
        if wanted not in _early:
            if holder not in _lost:
                _kept.setdefault(number, fresh).holders[token] = holder
            return
        _early.remove(wanted)
        entry = _kept.get(number)
        freed = _kept.pop(number) if entry is not None and not entry.holders else None
    del freed  # not under the lock: with a value may go whatever it held


def put(number: Number, value: Any) -> None:
    """Keep a value for those who hold it; nobody may, any more."""
    with _lock:
        entry = _kept.get(number)
        if entry is None or entry.made.is_set():
            return
        entry.value = value
        entry.made.set()
    entry.ready.set_result(None)  # not under the lock: answers are sent from here


def local(number: Number, timeout_s: float) -> Any:
    """Return a value of this worker; none within the time raises TimeoutError."""
    entry = _entry(number)
    if not entry.made.wait(timeout_s):
        raise TimeoutError
    return entry.value


def forget(worker: str) -> None:
    """Let go of all that a lost worker held."""
    with _lock:
        _lost.add(worker)
        holds = [
            (number, token)
            for number, entry in _kept.items()
            for token, holder in entry.holders.items()
            if holder == worker
        ]
    drop(holds)


def clear() -> None:
    """Forget everything: a session begins, or has ended."""
    with _lock:
        freed = list(_kept.values())
        _kept.clear()
        _early.clear()
        _lost.clear()
    freed.clear()  # not under the lock: with a value may go whatever it held


@own
def add(number: Number, token: Token, holder: str) -> None:
    """Hear of one more hold from the worker that passes a reference on."""
    hold(number, token, holder)


@own
def spoil(number: Number, failure: Any, held: tuple[Token, str] | None) -> None:
    """Hear from the worker that asked for a value that the call came to nothing, for whoever waits for it.

    `held` is its hold and its name where the call never came here; else the call brings them, sooner or later.
    """
    if held is not None:
        hold(number, *held)
    else:
        _entry(number)
    put(number, failure)


@own
def drop(holds: list[Hold]) -> None:
    """Hear that some holds are let go of."""
    freed: list[_Kept] = []
    with _lock:
        for one in holds:
            entry = _kept.get(one[0])
            if entry is None or entry.holders.pop(one[1], None) is None:
                _early.add(one)
            elif not entry.holders:
                freed.append(_kept.pop(one[0]))
    freed.clear()  # not under the lock: with a value may go whatever it held


@own
@functions.async_execution  # type: ignore[untyped-decorator]
def fetch(number: Number, caller: str) -> Future[Any]:
    """Return a value to another worker when it is there; no thread waits with it."""
    entry = _entry(number)

    def give(_: Any = None) -> Any:
        begin(caller)  # the answer is written next, on this thread
        return entry.value

    if not entry.made.is_set():
        return entry.ready.then(give)
    answer: Future[Any] = Future()
    answer.set_result(give())
    return answer


def _entry(number: Number) -> _Kept:
    there = _kept.get(number)
    if there is not None:
        return there
    fresh = _Kept()
    with _lock:
        return _kept.setdefault(number, fresh)

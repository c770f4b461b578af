"""What the ranks of a world that somebody else has started tell each other of their calls: who has come, who has left, and why.

Their processes live on after a call, so nobody sees from outside that one of them has left it. What they tell lies in the store
that they meet at. A rank that is alone refused, fails or ends gives its farewell there, and the others' waits end with it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from paceline.errors import InputError, PacelineError, WorkerFailedError
from paceline.transport.store import StoreTimeoutError
from paceline.world import ended, env, join
from paceline.world.env import Identity
from paceline.world.interruption import InterruptedWaitError, Interruption
from paceline.world.peer_failure import is_lost_peer
from paceline.world.peer_failure_messages import text_of

_ALL = b"all"
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.05
_WATCH_S = 1.0
"""How often a rank at work looks whether another one has left."""
_TELL_S = 5.0
"""How long a rank that leaves may take to say so."""
_GONE_S = 1.0
"""How long to look for the farewell of a rank whose connections have closed."""
_NAMED = 4
"""So many ranks a line names."""

_untold: dict[str, bytes] = {}
"""Farewells of calls that were left before this process had reached the store."""
_store: Store | None = None
"""A connection of its own to the store: an interrupted wait of the group's is not this one's."""
_met: Store | None = None
"""The group's, which is held as long: torch keeps only half of a store that is written in Python."""


class Presence:
    """One rank's part in one call."""

    def __init__(self, identity: Identity, call: str = "") -> None:
        """`call` names one that is not counted among the launches of the process."""
        self._identity = identity
        self._call = call or f"call {identity.launch + 1}"
        self._place = f"presence/{call or identity.launch}"

    def arrive(self, store: Store, timeout_s: float) -> None:
        """Wait until all ranks have come to this call; raise where one of them will not."""
        own = _keep(store, self._identity.rank)
        own.set(f"presence/at/{self._identity.rank}", f"in its {self._call}")
        if own.add(f"{self._place}/here", 1) == self._identity.size:
            own.compare_set(f"{self._place}/news", "", _ALL.decode())
        deadline, pause = time.monotonic() + timeout_s, _FIRST_LOOK_S
        lookout = ended.Lookout(own, self._identity)
        while not own.check([f"{self._place}/news"]):
            # Looked for in this order: a rank may come last to this call, go through it, and end.
            gone = lookout.find()
            if gone is not None and not own.check([f"{self._place}/news"]):
                raise WorkerFailedError(*gone, "has ended and will not come to this call")
            if time.monotonic() > deadline:
                raise InterruptedWaitError(
                    f"timed out waiting for all ranks after {timeout_s:g} s: {self.others()}"
                )
            time.sleep(pause)
            pause = min(2 * pause, max(_LONGEST_LOOK_S, self._identity.size / 2000))
        news = own.get(f"{self._place}/news")
        if news != _ALL:
            raise _as_error(news)

    def others(self) -> str:
        """Return at which call the others are, as far as they are not in this one."""
        here, apart = f"in its {self._call}", []
        for rank in range(self._identity.size):
            key = f"presence/at/{rank}"
            at = "not here yet" if _store is None or not _store.check([key]) else _store.get(key).decode()
            if at != here and rank != self._identity.rank:
                apart.append(f"rank {rank} is {at}")
        more = f" and {len(apart) - _NAMED} more" if len(apart) > _NAMED else ""
        return f"this rank is {here}, {', '.join(apart[:_NAMED])}{more}" if apart else ""

    def leave(self, error: BaseException) -> None:
        """Tell the others that this rank leaves the call for an exception; only the first farewell counts."""
        said = text_of(error)
        if isinstance(error, SystemExit):
            said = f"it ended with status {error.code}"
        elif not isinstance(error, PacelineError):
            said = f"{type(error).__name__}: {said}" if said else type(error).__name__
        kind = "input" if isinstance(error, InputError) else "code"
        farewell = json.dumps([self._identity.rank, env.host(), said, kind]).encode()
        with _suppressed():
            own = _store or _reach(self._identity)
            if own is None:
                _untold[self._place] = farewell
            else:
                _tell(own, self._place, farewell)
                own.set(f"presence/at/{self._identity.rank}", f"through with its {self._call}")

    def finish(self) -> None:
        """Tell the others that this rank has come to the end of the call."""
        if _store is not None:
            said = json.dumps([self._identity.rank, env.host(), "", ""])
            with _suppressed():
                _store.compare_set(f"{self._place}/finished", "", said)
                _store.set(f"presence/at/{self._identity.rank}", f"through with its {self._call}")

    def explained(self, error: BaseException) -> PacelineError | None:
        """Return which rank has left this call, and why, where an error comes of that; None where no rank has said so."""
        if not is_lost_peer(error) and (error.__cause__ is None or not is_lost_peer(error.__cause__)):
            return None
        until = time.monotonic() + _GONE_S
        lookout = None if _store is None else ended.Lookout(_store, self._identity)
        while _store is not None and lookout is not None:
            with _suppressed():
                if _store.check([f"{self._place}/left"]):
                    return _as_error(_store.get(f"{self._place}/left"))
                if _store.check([f"{self._place}/finished"]):
                    return WorkerFailedError(
                        *_read(_store.get(f"{self._place}/finished"))[:2],
                        "has come to the end of this call, in which others still wait for it. Let all ranks call the same "
                        "function, with the same arguments.",
                    )
                if (gone := self._ended_in_it(lookout)) is not None:
                    return gone
            if time.monotonic() > until:
                break
            time.sleep(_LONGEST_LOOK_S)
        return None

    @contextlib.contextmanager
    def watching(self, interruption: Interruption) -> Iterator[None]:
        """End every wait of this rank's group in the block once another rank has left."""
        over = threading.Event()
        lookout = None if _store is None else ended.Lookout(_store, self._identity)

        def watch() -> None:
            while not over.wait(max(_WATCH_S, self._identity.size / 200)):
                with _suppressed():
                    if _store is None or lookout is None:
                        return
                    if _store.check([f"{self._place}/left"]) or self._ended_in_it(lookout) is not None:
                        interruption.interrupt()
                        return

        thread = threading.Thread(target=watch, name="paceline-presence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _ended_in_it(self, lookout: ended.Lookout) -> WorkerFailedError | None:
        """Return which rank has ended with this call before its part was done, where one has."""
        gone = lookout.find()
        if gone is None or _store is None:
            return None
        at = f"presence/at/{gone[0]}"
        if not _store.check([at]) or _store.get(at).decode() != f"in its {self._call}":
            return None
        return WorkerFailedError(*gone, "has ended in this call, before its part was done")


def _keep(store: Store, rank: int) -> Store:
    """Keep a connection to the store, and tell there what this process could not tell yet."""
    global _store, _met
    if _store is None:
        atexit.register(_end, os.getpid())
    _met, _store = store, store.clone()  # type: ignore[attr-defined]  # torch's stubs leave it out
    _store.set_timeout(timedelta(seconds=_TELL_S))
    ended.register(_store, rank)
    for place, farewell in _untold.items():
        _tell(_store, place, farewell)
    _untold.clear()
    return _store


def _reach(identity: Identity) -> Store | None:
    """Return the store where somebody else than a rank serves it, so that it is there already."""
    if not identity.store and not env.has_agent_store():
        return None
    return _keep(join.meet(identity, timedelta(seconds=_TELL_S)), identity.rank)


def _tell(store: Store, place: str, farewell: bytes) -> None:
    store.compare_set(f"{place}/left", "", farewell.decode())
    store.compare_set(f"{place}/news", "", farewell.decode())


def _end(process: int) -> None:
    """Tell the others that this process ends."""
    identity = env.identity()
    if _store is not None and identity is not None and os.getpid() == process:
        with _suppressed():
            _store.compare_set(ended.KEY, "", ended.word(identity.rank, env.host()))


def _as_error(farewell: bytes) -> PacelineError:
    rank, host, said, kind = _read(farewell)
    if kind == "input":
        return InputError(f"rank {rank} has left this call: {said}")
    return WorkerFailedError(rank, host, f"has left this call: {said}")


def _read(farewell: bytes) -> tuple[int, str, str, str]:
    rank, host, said, kind = json.loads(farewell)
    return int(rank), str(host), str(said), str(kind)


def _suppressed() -> contextlib.AbstractContextManager[None]:
    """Go on where the store is gone: then the world is, and there is nobody to tell."""
    return contextlib.suppress(RuntimeError, PacelineError, StoreTimeoutError, OSError)

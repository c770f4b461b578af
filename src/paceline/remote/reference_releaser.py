"""Tells owners what this worker has let go of: many at a time, on a thread of its own, in an order that loses nothing."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from torch.distributed import rpc

from paceline.remote import object_store
from paceline.remote.object_store import Hold
from paceline.remote.session import Session

GATHER_S = 0.002
"""How long an owner waits to be told, so that it is told of many at once."""
Return = tuple[str, Hold, list[Any], object]
"""An owner, what is let go of there, what it must have heard before, and what must live until then."""


class Returns:
    """What one worker gives back in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._queue: SimpleQueue[Return | None] = SimpleQueue()
        self.put = self._queue.put
        """Takes a `Return`; safe in a finaliser."""
        session.at_close(lambda: self._queue.put(None))
        threading.Thread(target=self._serve, daemon=True, name="paceline-references").start()

    def _serve(self) -> None:
        while self._take(self._queue.get()):
            pass

    def _take(self, first: Return | None) -> bool:
        """Report one and all that wait behind it; nothing of them is kept, for what they hold is to go. No more: False."""
        if first is not None:
            time.sleep(GATHER_S)
        more = [self._queue.get_nowait() for _ in range(self._queue.qsize())]  # nobody else takes any
        ready: dict[str, list[Hold]] = defaultdict(list)
        for one in (first, *more):
            if one is None:
                return False
            owner, hold, unheard = one[:3]
            late = next((call for call in unheard if not call.done()), None)
            if late is None:
                ready[owner].append(hold)
            else:
                late.add_done_callback(lambda _, one=one: self._queue.put(one))
        self._tell(ready)
        return True

    def _tell(self, ready: Mapping[str, list[Hold]]) -> None:
        for owner, holds in ready.items():
            if owner == self._session.name:
                object_store.drop(holds)
            elif owner not in self._session.lost:
                with suppress(RuntimeError):  # it is gone, and all that it had with it
                    rpc.rpc_async(owner, object_store.drop, args=(holds,))


_telling: Returns | None = None
_session: Session | None = None
_lock = threading.RLock()


def returns(session: Session) -> Returns:
    """Return what takes the returns of a session."""
    global _telling, _session
    with _lock:
        if _telling is None or _session is not session:
            _session, _telling = session, Returns(session)
        return _telling

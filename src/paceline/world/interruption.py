"""Makes what waits for other workers stop: for a worker that has learned that one of them is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

Value = TypeVar("Value")
POLL_S = 0.0005
PATIENCE_S = 60.0
LOOK_S = 0.5
"""How often whoever waits for other workers in a step looks whether they will come."""


class InterruptedWaitError(RuntimeError):
    """A wait for other workers was ended, because one of them is gone or another joins."""


class Interruption:
    """Raised once for each group, from any thread; what is in flight in that group then fails."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._raised = False
        self._breakers: list[Callable[[], None]] = []
        self.discards: Callable[[Exception], bool] | None = None
        """Asked while the user's code computes a step: whether a failure is a lost peer, so that the step is discarded."""
        self.forsaken: Callable[[], None] | None = None
        """Raises where a worker that is waited for in a step has left the loop, and will never come."""

    def outlive(self, action: Callable[[], Value], otherwise: Callable[[], Value]) -> Value:
        """Return what `action` does; where the group breaks in a step that is then discarded, what `otherwise` does.

        For messages in the middle of the user's own code, which no exception may end: it is to come to the end of the step,
        with values that are worth nothing, and is given the step once more.
        """
        try:
            return action()
        except Exception as error:
            if self.discards is None or not self.discards(error):
                raise
            return otherwise()

    @property
    def raised(self) -> bool:
        """Whether the group is being left."""
        return self._raised

    def on_raise(self, breaker: Callable[[], None]) -> None:
        """Register `breaker` to be called on the interruption: at once, if it has come already."""
        with self._lock:
            if not self._raised:
                self._breakers.append(breaker)
                return
        breaker()

    def interrupt(self) -> None:
        """Break every wait of this group."""
        with self._lock:
            if self._raised:
                return
            self._raised = True
            # Nothing of the group is kept: its shared memory goes with the last that holds it.
            breakers, self._breakers = self._breakers, []
        for breaker in breakers:
            breaker()

    def await_change(self, changed: threading.Condition) -> None:
        """Wait for a condition that this thread holds, for a while; raise where who is to bring it will never come."""
        if not changed.wait(LOOK_S) and self.forsaken is not None:
            self.forsaken()

    def check(self) -> None:
        """Raise here if the interruption has come."""
        if self._raised:
            raise InterruptedWaitError("the group is broken: a worker was lost, or another one joins")


class InterruptibleStore(Store):
    """Another store whose waits end when the interruption comes: torch's own wait until their time-out."""

    def __init__(self, store: Store, interruption: Interruption, patience_s: float = PATIENCE_S) -> None:
        super().__init__()
        self._store, self._interruption, self._patience_s = store, interruption, patience_s

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value when it is there."""
        self._await([key])
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Store a value in place of an expected one."""
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Forget a key."""
        return self._store.delete_key(key)

    deleteKey = delete_key  # noqa: N815  (by this name torch's C++ half asks for it)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several values when all are there."""
        self._await(keys)
        return self._store.multi_get(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """Return when all keys are there; torch's own time-out is that of its operations, far too long for a meeting."""
        self._await(keys)

    def _await(self, keys: list[str]) -> None:
        limit = time.monotonic() + self._patience_s
        self._interruption.check()
        while not self._store.check(keys):
            self._interruption.check()
            if time.monotonic() > limit:
                raise InterruptedWaitError(f"timed out waiting for {', '.join(keys)}")
            time.sleep(POLL_S)

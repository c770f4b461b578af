"""A piece of work in a thread of its own: whether it is done, what it came to, and a way to say it is not wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Background(Generic[Value]):
    """Work that has begun."""

    def __init__(self, work: Callable[[Background[Value]], Value]) -> None:
        self._given_up = threading.Event()
        self._outcome: list[Value] = []
        self._failure: BaseException | None = None
        # It must not keep a process alive that has been told to end: whatever it leaves is swept later.
        self._thread = threading.Thread(target=self._run, args=(work,), name="paceline-save", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `result` would return at once."""
        return not self._thread.is_alive()

    @property
    def given_up(self) -> bool:
        """Whether the outcome is not wanted any more."""
        return self._given_up.is_set()

    def give_up(self) -> None:
        """Ask the work to end where it is."""
        self._given_up.set()

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end, but not longer than so."""
        self._thread.join(seconds)
        return self.done

    def wait(self) -> None:
        """Wait for the end, whatever it came to."""
        self._thread.join()

    def result(self) -> Value:
        """Wait for the end; give what the work came to, or raise what went wrong."""
        self.wait()
        if self._failure is not None:
            raise self._failure
        return self._outcome[0]

    def _run(self, work: Callable[[Background[Value]], Value]) -> None:
        try:
            self._outcome.append(work(self))
        except BaseException as error:  # noqa: BLE001  (raised again in the thread that asks for the result)
            self._failure = error

"""Operations in flight: over at once, on torch's `Work`, or a message between two ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Generic, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

Value = TypeVar("Value")


class Finished(Generic[Value]):
    """An operation that was over when it began."""

    def __init__(self, value: Value) -> None:
        self._value = value

    def wait(self) -> Value:
        """Return the value."""
        return self._value

    def done(self) -> bool:
        """Return True."""
        return True


class FinishedReduction(Finished[Tensor]):
    """A reduction that was over when it began."""

    def future(self) -> Future[Tensor]:
        """Return a future that holds the value already."""
        future: Future[Tensor] = Future()
        future.set_result(self._value)
        return future


class WorkingReduction:
    """A reduction of torch's in flight; a mean is divided once, when the sum is there."""

    def __init__(self, work: dist.Work, tensor: Tensor, divisor: int | None) -> None:
        self._work = work
        self._tensor = tensor
        self._future: Future[Tensor] | None = None
        if divisor is not None:
            self._future = work.get_future().then(lambda _: _first(_).div_(divisor))

    def wait(self) -> Tensor:
        """Wait for the sum, or for the division of it."""
        if self._future is not None:
            return self._future.wait()
        self._work.wait()
        return self._tensor

    def done(self) -> bool:
        """Ask torch."""
        return self._future.done() if self._future is not None else self._work.is_completed()

    def future(self) -> Future[Tensor]:
        """Return torch's future of the reduced tensor."""
        if self._future is None:
            self._future = self._work.get_future().then(_first)
        return self._future


class Delivery(Generic[Value]):
    """A message to or from one rank; it keeps the buffer alive until the message is through."""

    def __init__(
        self, work: dist.Work, buffer: Tensor, finish: Callable[[], Value], timeout: timedelta
    ) -> None:
        self._work, self._timeout = work, timeout
        self._buffer = buffer
        self._finish = finish
        self._waiter: Thread | None = None
        self._failure: Exception | None = None
        self._through = False

    def wait(self) -> Value:
        """Wait for the message."""
        if self._waiter is not None:
            self._waiter.join()
        else:
            self._wait_once()
        if self._failure is not None:
            raise self._failure
        return self._finish()

    def done(self) -> bool:
        """Return whether the message is through.

        Gloo only finds out inside `wait` (`is_completed` stays False before it), so the first question moves
        the waiting to a thread.
        """
        if self._waiter is None and not self._through:
            self._waiter = Thread(target=self._wait_once, name="paceline-delivery", daemon=True)
            self._waiter.start()
        return self._through

    def _wait_once(self) -> None:
        """Wait on torch a single time: a second wait on a message that is through never returns on gloo."""
        if self._through:
            return
        try:
            self._work.wait(self._timeout)
        except Exception as failure:  # noqa: BLE001 - raised again by wait()
            self._failure = failure
        self._through = True


def _first(future: Future[list[Tensor]]) -> Tensor:
    return future.value()[0]

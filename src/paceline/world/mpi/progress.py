"""Operations in flight: one thread per process drives them to their end, and whoever waits for one helps.

MPI has no threads of its own: an operation goes on while somebody asks about one. A thread that nobody waits beside asks, less
and less often while nothing happens; it sleeps where nothing is in flight.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from paceline.errors import InputError
from paceline.world.mpi import library

Steps = Generator[Sequence[Any], list[Any] | None, None]
"""What an operation does: it starts requests of MPI, yields them, and is sent their statuses when they are done."""
SPINS = 50
"""How often MPI is asked in a row, yielding the core in between, before the first sleep."""
LAST_S = 10.0
"""How long a process that leaves waits for messages that nobody has taken yet."""
FIRST_SLEEP_S, LONGEST_SLEEP_S = 20e-6, 1e-3


class MpiError(RuntimeError):
    """An operation over MPI failed."""


class Operation:
    """One operation in flight."""

    def __init__(
        self,
        name: str,
        steps: Steps,
        results: list[Tensor],
        timeout_s: float,
        turns: deque[Operation] | None = None,
    ) -> None:
        self.name = name
        self.results = results
        self.error: Exception | None = None
        self.ended = False
        """Whether it is over, well or not."""
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._steps = steps
        self._turns = turns
        self._requests: list[Any] = []
        self._statuses: list[Any] | None = None
        self._lock = threading.Lock()
        self._future: Future[list[Tensor]] | None = None
        self._published = False

    def begin(self, mpi: Any) -> None:
        """Start the first requests; `turns` are the group's operations of several steps, in the order of their beginning."""
        if self._turns is not None:
            self._turns.append(self)
        try:
            self._step(mpi)
        except InputError as error:
            self._end(error)
            raise
        except Exception as error:  # noqa: BLE001  (raised again by whoever waits)
            self.fail(self._described(mpi, error))

    def advance(self, mpi: Any) -> None:
        """Ask MPI, and go on where all requests are done."""
        try:
            # Ranks may come to the end of a step in different orders, but must start collectives in one order.
            while not self.ended and mpi.Request.Testall(self._requests, self._statuses) and self._is_next():
                self._step(mpi)
        except Exception as error:  # noqa: BLE001  (raised again by whoever waits)
            self.fail(self._described(mpi, error))
        if not self.ended and time.monotonic() > self.deadline:
            self.fail(
                MpiError(
                    f"{self.name} over MPI did not end within the timeout of {self.timeout_s:g} s: "
                    "another rank has not come to it, or is gone."
                )
            )

    def limit(self, timeout_s: float) -> None:
        """Set the timeout and start it anew."""
        self.timeout_s, self.deadline = timeout_s, time.monotonic() + timeout_s

    def fail(self, error: Exception) -> None:
        """End it with an error; its memory is kept, because MPI may still write there."""
        _abandoned.append((self._requests, self._steps))
        library.abandon()
        self._end(error)

    def future(self) -> Future[list[Tensor]]:
        """Return torch's future of the results."""
        with self._lock:
            if self._future is None:
                devices: list[int | str | torch.device] = list(
                    {one.device for one in self.results if one.is_cuda}
                )
                self._future = Future(devices=devices)
                if self._published:
                    self._fill(self._future)
            return self._future

    def publish(self) -> None:
        """Complete the future, where somebody has asked for one: what hangs on it runs here."""
        with self._lock:
            self._published = True
            future = self._future
        if future is not None:
            self._fill(future)

    def _fill(self, future: Future[list[Tensor]]) -> None:
        if self.error is not None:
            future.set_exception(self.error)  # type: ignore[arg-type]
        else:
            future.set_result(self.results)

    def _is_next(self) -> bool:
        return self._turns is None or self._turns[0] is self

    def _step(self, mpi: Any) -> None:
        try:
            with torch.no_grad():
                self._requests = list(self._steps.send(self._statuses))
        except StopIteration:
            self._end(None)
        else:
            self._statuses = [mpi.Status() for _ in self._requests]

    def _end(self, error: Exception | None) -> None:
        self.error, self.ended = error, True
        if self._turns is not None:
            self._turns.remove(self)

    def _described(self, mpi: Any, error: Exception) -> Exception:
        """Return an error as one line; of several requests, MPI says only beside the one that failed what is wrong."""
        codes = [status.Get_error() for status in self._statuses or ()]
        text = next((mpi.Get_error_string(code) for code in codes if code != mpi.SUCCESS), str(error))
        return MpiError(f"{self.name} over MPI failed: {' '.join(text.split())}")


_abandoned: list[Any] = []
"""What MPI may still read or write, of operations that have failed."""


@contextlib.contextmanager
def kept_on_error(what: object) -> Iterator[None]:
    """Keep the memory of operations in flight where one beside them fails."""
    try:
        yield
    except StopIteration:
        raise
    except Exception:
        _abandoned.append(what)
        library.abandon()
        raise


class OperationsInFlight:
    """Everything that is in flight in this process."""

    def __init__(self) -> None:
        self._mpi = library.load()
        self._asking = threading.Lock()
        """Held while requests are started or asked about: both in one order."""
        self._flight: list[Operation] = []
        self._changed = threading.Condition()
        self._helpers = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-mpi", daemon=True)
        self._thread.start()

    def start(self, operation: Operation) -> None:
        """Start an operation; raise InputError where it cannot be, and leave all else that goes wrong to whoever waits."""
        with self._asking:
            operation.begin(self._mpi)
            if not operation.ended:
                self._flight.append(operation)
        if operation.ended:
            operation.publish()
            return
        with self._changed:
            self._changed.notify()

    def wait(self, operation: Operation) -> None:
        """Drive what is in flight until this operation has ended."""
        if operation.ended:
            return
        with self._changed:
            self._helpers += 1
        pause = _Pause()
        try:
            while not operation.ended:
                self._advance()
                if not operation.ended:
                    pause.take()
        finally:
            with self._changed:
                self._helpers -= 1
                self._changed.notify()

    def has_ended(self, operation: Operation) -> bool:
        """Ask MPI once about what is in flight, and return whether this operation has ended."""
        if not operation.ended:
            self._advance()
        return operation.ended

    def fail(self, of: Callable[[Operation], bool], error: Exception) -> None:
        """End operations in flight with an error."""
        with self._asking:
            failed = [one for one in self._flight if of(one)]
            for one in failed:
                one.fail(error)
            self._flight = [one for one in self._flight if not one.ended]
        for one in failed:
            one.publish()

    def close(self) -> None:
        """Finish what is in flight, messages that nobody has waited for say, and end the thread."""
        until = time.monotonic() + (LAST_S if library.is_healthy() else 0)
        pause = _Pause()
        while self._flight and time.monotonic() < until:
            self._advance()
            pause.take()
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        if self._flight:
            library.abandon()

    def _advance(self) -> bool:
        """Ask about everything once; return whether anything ended."""
        with self._asking:
            for one in self._flight:
                one.advance(self._mpi)
            ended = [one for one in self._flight if one.ended]
            if ended:
                self._flight = [one for one in self._flight if not one.ended]
        for one in ended:
            one.publish()
        return bool(ended)

    def _run(self) -> None:
        pause = _Pause()
        while True:
            with self._changed:
                if not self._flight or self._helpers:
                    pause = _Pause()
                while (not self._flight or self._helpers) and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            if self._advance():
                pause = _Pause()
            else:
                pause.take()


class _Pause:
    """What is done between two looks: yield the core at first, then sleep longer and longer."""

    def __init__(self) -> None:
        self._looks = 0
        self._sleep_s = FIRST_SLEEP_S

    def take(self) -> None:
        """Let others run."""
        self._looks += 1
        if self._looks <= SPINS:
            os.sched_yield()
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(2 * self._sleep_s, LONGEST_SLEEP_S)

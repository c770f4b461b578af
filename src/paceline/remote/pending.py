"""A call that is in flight: who waits for it, and what it came to."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from paceline.errors import CallRefusedError
from paceline.remote.failures import CallFailure, unsendable
from paceline.transport.mailbox import Mailbox
from paceline.transport.values import Buffer, Reader, Vocabulary

Lift = Callable[[list[Tensor], list[str | None]], list[Tensor]]
"""Makes of tensors that were noted in a message, and their devices, those that stand in its values."""
UNSENDABLE, UNREAD, GRANTS = 1, 2, 4
"""Of a failure: the value had no form on the wire; the request could not be read. Of an answer: references are in it."""


class PendingCall:
    """One request to a worker. Its answer is read by whoever waits for it, so that no other answer waits meanwhile."""

    holds: object = None
    """What must live until the answer is there."""
    take_back: Callable[[], None] | None = None
    """Releases what the request hands over, where it cannot be read."""
    lift: Lift | None = None
    """Takes the answer's tensors, where gradients go back."""
    _content: memoryview | None = None
    _frames: Sequence[Buffer] = ()
    _error: Callable[[], BaseException] | None = None
    _value: Any = None
    _ended = False

    def __init__(
        self,
        mailbox: Mailbox,
        vocabulary: Vocabulary,
        number: int,
        worker: str,
        what: str,
        timeout_s: float,
    ) -> None:
        self.number, self.worker, self.what, self.timeout_s = number, worker, what, timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._mailbox, self._vocabulary = mailbox, vocabulary
        self._done = threading.Lock()
        self._done.acquire()
        self._callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Return whether it has ended."""
        return self._ended

    def when_done(self, action: Callable[[], None]) -> None:
        """Have something done when it has ended: at once, if it has already."""
        self._callbacks.append(action)
        if self._ended:
            self._run_callbacks()

    def wait(self) -> Any:
        """Return the answer when it is there, or raise what the call came to; its time is kept by the exchange.

        Until then this thread takes the messages of the worker, unless another one does.
        """
        if not self._ended:
            self._mailbox.step_aside()
            with self._mailbox.reading(self.worker) as reading:
                reading.until(self.done)
        with self._done:
            self._read()
        if self._error is not None:
            raise self._error()
        return self._value

    def answer(self, flags: int, content: memoryview, frames: Sequence[Buffer]) -> None:
        """Take the answer."""
        self._content, self._frames = content, frames
        if flags & GRANTS:
            self._read()  # nobody may wait for it, and what it hands over is to be released again
        self._end()

    def fail(self, flags: int, content: memoryview, frames: Sequence[Buffer]) -> None:
        """Take a failure of the worker's."""
        try:
            told = Reader(self._vocabulary, content, frames).value()
        except CallRefusedError as error:
            text = str(error)
            self.give_up(lambda: CallRefusedError(text))
            return
        if flags & UNSENDABLE:
            self.give_up(lambda: unsendable(self.worker, self.what, told))
            return
        if flags & UNREAD and self.take_back is not None:
            self.take_back()
        self._error = CallFailure(*told).exception
        self._end()

    def give_up(self, error: Callable[[], BaseException]) -> None:
        """End without word from the worker."""
        self._error = error
        self._end()

    @property
    def error(self) -> BaseException | None:
        """What it came to, once it has ended, without reading an answer."""
        return None if self._error is None else self._error()

    def _end(self) -> None:
        self._ended = True
        self.holds = self.take_back = None
        self._done.release()
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                action = self._callbacks.pop()
            except IndexError:
                return
            try:
                action()
            except Exception:  # noqa: BLE001  (of the user's: this thread takes the answers of all other calls, too)
                traceback.print_exc(file=sys.stderr)

    def _read(self) -> None:
        content, self._content = self._content, None
        if content is None:
            return
        try:
            self._value = Reader(self._vocabulary, content, self._frames, self.lift).value()
        except CallRefusedError as error:
            text = str(error)
            self._error = lambda: CallRefusedError(text)
        self._frames = ()

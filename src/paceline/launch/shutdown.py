"""How a launch ends: the failures that end it, the user's Ctrl-C, and how long the workers have to go."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator

from paceline.launch import failures
from paceline.launch.failures import WorkerFailure

FIRST_CAUSE_WAIT_S = 0.3
"""How long others may still report after the first failure, so that the cause is found and not its echo."""
ECHO_WAIT_S = 2.0
"""The same while all that is known are lost peers: the one that began it may still be closing its files."""
TERMINATE_WAIT_S = 1.0
"""From SIGTERM to SIGKILL."""
LEFT_BEHIND_S = 10.0
"""From the first SIGKILL to where nobody waits any more: a process that the kernel holds in a read or a write does not end."""
STOP_WAIT_S = 10.0
"""How long a step, an evaluation or a checkpoint may take after a notice before the user is told how to leave at once."""


class Shutdown:
    """The end of a launch: what caused it, and when the next signal is due; nothing before that."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        self.interrupted: int | None = None
        """The signal that asked for the end at once, if one did."""
        self.notice: int | None = None
        """The signal that asked for an end after the next step, with a checkpoint, if one did."""
        self.remind_at: float | None = None
        """When to say that the end takes long, and how to leave at once."""
        self.grace_s = TERMINATE_WAIT_S
        """How long workers have that are ended because the launcher got SIGTERM: they may have something to save."""
        self._patience_s = TERMINATE_WAIT_S
        self.saves_wanted = 0
        """How many signals asked for a checkpoint that has not been ordered yet."""
        self._failures: list[WorkerFailure] = []
        self._failed_at = 0.0
        self._ended: tuple[int, float] | None = None
        """The rank of a script that was the last to end with status 0 by itself, and when."""
        self._next = signal.SIGTERM
        self._killed_at: float | None = None

    @property
    def in_progress(self) -> bool:
        """Whether the launch is ending."""
        return self.deadline is not None

    @property
    def due(self) -> bool:
        """Whether it is time for the next signal."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def overdue(self) -> bool:
        """Whether workers have had SIGKILL for so long that they will not end."""
        return self._killed_at is not None and time.monotonic() > self._killed_at + LEFT_BEHIND_S

    @property
    def cause(self) -> WorkerFailure | None:
        """What ended it, if it was a failure."""
        cause = failures.first_cause(self._failures) if self._failures else None
        if cause is None or self._ended is None:
            return cause
        rank, when = self._ended
        return failures.follows(cause, rank, max(0.0, self._failed_at - when))

    def note(self, failure: WorkerFailure) -> None:
        """Take note of what followed; one that only went when it was told to is no cause."""
        was_told = self._next is not signal.SIGTERM and failure.kind in ("exit", "signal")
        if not (was_told and self._failures):
            self._failures.append(failure)

    def note_ended(self, rank: int) -> None:
        """Take note of a script's end on a rank, with status 0."""
        if self._next is signal.SIGTERM:
            self._ended = rank, time.monotonic()

    def begin(self, failure: WorkerFailure) -> None:
        """End the launch, because of this."""
        self.note(failure)
        self._failed_at = time.monotonic()
        wait = ECHO_WAIT_S if failure.kind == "peer" else FIRST_CAUSE_WAIT_S
        self.deadline = time.monotonic() + wait

    def signals(self) -> tuple[signal.Signals, signal.Signals]:
        """Return the signal that is due for a worker and for one in training; the next is stronger."""
        plain, self._next = self._next, signal.SIGKILL
        self.deadline = time.monotonic() + self._patience_s
        if plain is signal.SIGKILL and self._killed_at is None:
            self._killed_at = time.monotonic()
        # In training SIGTERM is a notice; these are to go now.
        return plain, signal.SIGRTMIN if plain == signal.SIGTERM else plain

    def interrupt(self, number: int) -> None:
        """End the launch at once, because a signal asks for it."""
        first = self.interrupted is None and number == signal.SIGTERM
        self._patience_s = self.grace_s if first else TERMINATE_WAIT_S
        self.interrupted = self.interrupted or number
        self.deadline = time.monotonic()

    @contextlib.contextmanager
    def on_signals(
        self, selector: selectors.BaseSelector, notices: Collection[signal.Signals] = ()
    ) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into an orderly end, for as long as the workers run; the first of `notices` into a notice.

        SIGUSR1 asks for a checkpoint on the way.
        """

        def interrupt(number: int, _: object) -> None:
            if number in notices and self.notice is None and not self.in_progress:
                self.notice = number
            else:
                self.interrupt(number)

        def ask_for_save(_: int, __: object) -> None:
            self.saves_wanted += 1

        taken: dict[signal.Signals, Callable[[int, object], None]] = {
            signal.SIGINT: interrupt,
            signal.SIGTERM: interrupt,
            signal.SIGUSR1: ask_for_save,
        }
        try:
            before = {number: signal.signal(number, taker) for number, taker in taken.items()}
        except ValueError:  # not the main thread: whoever owns it decides
            yield
            return
        read, write = socket.socketpair()
        write.setblocking(False)
        old = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        selector.register(read, selectors.EVENT_READ, lambda: read.recv(64))
        try:
            yield
        finally:
            signal.set_wakeup_fd(old)
            selector.unregister(read)
            read.close()
            write.close()
            for number, handler in before.items():
                signal.signal(number, handler)

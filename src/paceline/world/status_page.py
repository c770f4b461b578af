"""A worker's status page: one page of memory it shares with its launcher, where it stores what it is doing right now.

No message, and on x86-64 no system call: a worker stores a few words as it goes from reading data to computing to waiting for the
others, and the launcher looks at them when it likes. The page is an anonymous file (memfd) that the launcher makes
and hands over as a descriptor. Times are CLOCK_MONOTONIC, which all processes of a machine share.

A worker writes from one thread only, the one that trains.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, replace
from enum import IntEnum
from time import monotonic

from paceline.compat import futex
from paceline.compat.futex import barrier, full_barrier

SIZE = 4096
_NAME = "paceline-status"
# Words of eight bytes. The beat is odd while a worker is in the middle of storing words that belong together (a sequence
# lock): the barriers keep those words between the two stores of the beat, and the reader's loads between its two. An
# exception in the middle (a signal's) leaves it odd, and so begins the next storing.
# Phase and the moment it began change far more often, so they share one word, which is stored and loaded as one.
_BEAT, _PHASE, _, _TOUCHED, _OPERATION, _KIND, _STEP, _BATCHES, _STEPS = range(9)
_PHASE_BITS = 3
_NANOSECONDS = 1e9
_DATA_S, _COMPUTE_S, _COMMUNICATION_S, _LONGEST_S = range(9, 13)
_QUESTION, _ANSWERED, _LENGTH = range(16, 19)
_ANSWER = 1024
"""Where the answer to the launcher's question begins, in bytes."""
_READ_ATTEMPTS = 100
TIMEOUT_S = 60.0
"""How long a worker may stay silent, if no option says otherwise."""
STEPS = 10
"""A step may take this many times the longest one of late."""
FADING = 0.98
"""What is left of the longest step with each one after it: one slow step must not raise the limit for the rest of a run."""
PATIENCE = 10
"""What may take longer than a step gets this many times its limit: a first step, a compiler, a checkpoint, a new group."""
_NAP_S = 3600.0


class Phase(IntEnum):
    """What a worker's time goes into."""

    QUIET = 0
    """It has said nothing yet, and nobody expects it to."""
    STARTING = 1
    DATA = 2
    COMPUTE = 3
    COMMUNICATION = 4
    IDLE = 5
    """Between two operations, in the loop's own code."""
    ENDED = 6
    COMPILE = 7
    """Its compiler works for it, in a step."""


class OperationKind(IntEnum):
    """What operation a worker is in."""

    OTHER = 0
    STEP = 1
    EVALUATE = 2
    SAVE = 3


_PHASES = len(Phase)
_FENCES = barrier is full_barrier
"""Whether this processor needs a barrier between stores: a worker stores too often to call one that does nothing."""
# Looking a member up on its enumeration takes 0.2 us in Python 3.11, as long as a phase may cost: hot code keeps them.
_IDLE, _STEP_KIND, _OTHER = Phase.IDLE, OperationKind.STEP, OperationKind.OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a status page said at one moment."""

    phase: Phase
    since: float
    """When the phase began."""
    touched: float
    """When anything changed last, other than the phase."""
    operation: int
    """How many operations have begun."""
    kind: OperationKind
    step: int
    batches: int
    steps: int
    """How many steps this process has finished."""
    data_s: float
    """Seconds of all finished steps; so are the next two."""
    compute_s: float
    communication_s: float
    longest_s: float
    """The longest step but the first, what a compiler took of it left out; it fades with each one after it."""
    stopped: bool = False
    """Whether the process is stopped by a signal; its launcher sees that, not the status page."""
    whole: bool = True
    """Whether all of it is of one moment; else the worker is stopped, or has lost its core, in the middle of storing it."""

    def silence_s(self, now: float) -> float:
        """Return for how long nothing has changed."""
        return max(0.0, now - max(self.since, self.touched))

    @property
    def own_s(self) -> float:
        """Seconds of all finished steps that this worker needed for itself, not for waiting."""
        return self.data_s + self.compute_s


class NoStatusPage:
    """The status page of a worker that no launcher of ours watches; also the surface that a real one has."""

    __slots__ = ("timeout_s",)

    def __init__(self) -> None:
        self.timeout_s = TIMEOUT_S

    @property
    def limit_s(self) -> float:
        """How long another worker may stay silent in a step as long as this one's."""
        return self.timeout_s * PATIENCE

    def begin(self, kind: OperationKind, step: int, phase: Phase = Phase.COMPUTE) -> None:
        """Begin an operation, in some phase; one that was in flight counts as broken off."""

    def enter(self, phase: Phase) -> Phase:  # noqa: ARG002
        """Begin a phase and give the one before, to go back to."""
        return Phase.QUIET

    def batch(self) -> None:
        """Count a batch that was served."""

    def touch(self) -> None:
        """Show that this worker is not stuck, though it waits."""

    def end(self) -> None:
        """End the operation; only a step that ended counts."""


class StatusPage(NoStatusPage):
    """The worker's side: stores where it is."""

    __slots__ = ("_began", "_counts", "_kind", "_memory", "_phase", "_seconds", "_since", "_spent")

    def __init__(self, descriptor: int) -> None:
        """Map the page; the descriptor may be closed afterwards."""
        super().__init__()
        self._memory = mmap.mmap(descriptor, SIZE)
        self._counts = memoryview(self._memory).cast("Q")
        self._seconds = memoryview(self._memory).cast("d")
        self._phase, self._kind = Phase.QUIET, OperationKind.OTHER
        self._since = self._began = self._seconds[_TOUCHED] = monotonic()
        self._spent = [0.0] * _PHASES

    @property
    def limit_s(self) -> float:
        """How long another worker may stay silent in a step as long as this one's."""
        limit = max(self.timeout_s, STEPS * self._seconds[_LONGEST_S])
        return limit if self._counts[_STEPS] else limit * PATIENCE

    @staticmethod
    def create() -> int:
        """Make a page and give its descriptor."""
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, SIZE)
        return descriptor

    def begin(self, kind: OperationKind, step: int, phase: Phase = Phase.COMPUTE) -> None:
        """Begin an operation, in some phase; one that was in flight counts as broken off."""
        counts, now = self._counts, monotonic()
        self._spent = [0.0] * _PHASES
        self._kind, self._phase = kind, phase
        self._since = self._began = now
        counts[_PHASE] = int(now * _NANOSECONDS) << _PHASE_BITS | phase
        counts[_BEAT] |= 1
        if _FENCES:
            barrier()
        counts[_OPERATION] += 1
        counts[_KIND] = kind
        counts[_STEP] = step
        if _FENCES:
            barrier()
        counts[_BEAT] += 1

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase and give the one before, to go back to."""
        now, before = monotonic(), self._phase
        self._spent[before] += now - self._since
        self._since, self._phase = now, phase
        self._counts[_PHASE] = int(now * _NANOSECONDS) << _PHASE_BITS | phase
        return before

    def batch(self) -> None:
        """Count a batch that was served."""
        self._counts[_BATCHES] += 1
        self._seconds[_TOUCHED] = monotonic()

    def touch(self) -> None:
        """Show that this worker is not stuck, though it waits."""
        self._seconds[_TOUCHED] = monotonic()

    def end(self) -> None:
        """End the operation, into phase IDLE; only a step that ended counts."""
        self.enter(_IDLE)
        counts, seconds, took = self._counts, self._seconds, self._since - self._began
        if self._kind == _STEP_KIND:
            _, _, data, compute, communication, _, _, compiling = self._spent
            counts[_BEAT] |= 1
            if _FENCES:
                barrier()
            if counts[_STEPS]:
                seconds[_LONGEST_S] = max(seconds[_LONGEST_S] * FADING, took - compiling)
            counts[_STEPS] += 1
            seconds[_DATA_S] += data
            seconds[_COMPUTE_S] += compute + compiling
            seconds[_COMMUNICATION_S] += communication
            if _FENCES:
                barrier()
            counts[_BEAT] += 1
        self._kind = _OTHER
        counts[_KIND] = _OTHER

    def wait_for_question(self, seen: int) -> int:
        """Sleep until the launcher has asked something after question `seen`, and give the question's number."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + 8 * _QUESTION
        while (asked := self._counts[_QUESTION]) == seen:
            futex.wait(address, seen & futex.LOW, _NAP_S)
        return asked

    def answer(self, question: int, text: bytes) -> None:
        """Leave the answer to a question for the launcher; what does not fit the page is cut off."""
        text = text[: SIZE - _ANSWER]
        self._memory[_ANSWER : _ANSWER + len(text)] = text
        self._counts[_LENGTH] = len(text)
        barrier()
        self._counts[_ANSWERED] = question


class StatusPageReader:
    """The launcher's side: looks at one worker's page."""

    def __init__(self, descriptor: int) -> None:
        """Map the page; the descriptor may be closed afterwards."""
        self._memory = mmap.mmap(descriptor, SIZE)

    def read(self) -> Reading:
        """Return where the worker is now."""
        counts, seconds = self._words()
        for _ in range(_READ_ATTEMPTS):
            beat = counts[_BEAT]
            barrier()
            reading = _reading(counts, seconds)
            barrier()
            if counts[_BEAT] == beat and beat % 2 == 0:
                return reading
        # A worker that was stopped in the middle of storing stays odd: then this is as good as it gets.
        return replace(reading, whole=False)

    def ask(self) -> int:
        """Ask the worker for its pending collectives; gives the number of the question."""
        counts, _ = self._words()
        counts[_QUESTION] += 1
        futex.wake(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + 8 * _QUESTION)
        return counts[_QUESTION]

    def answer(self, question: int) -> bytes | None:
        """Return the worker's answer, or None while there is none."""
        counts, _ = self._words()
        if counts[_ANSWERED] != question:
            return None
        barrier()
        return self._memory[_ANSWER : _ANSWER + counts[_LENGTH]]

    def close(self) -> None:
        """Let go of the page."""
        self._memory.close()

    def _words(self) -> tuple[memoryview[int], memoryview[float]]:
        view = memoryview(self._memory)
        return view.cast("Q"), view.cast("d")


def _reading(counts: memoryview[int], seconds: memoryview[float]) -> Reading:
    phase = counts[_PHASE]
    return Reading(
        phase=Phase(phase & (1 << _PHASE_BITS) - 1),
        since=(phase >> _PHASE_BITS) / _NANOSECONDS,
        touched=seconds[_TOUCHED],
        operation=counts[_OPERATION],
        kind=OperationKind(counts[_KIND]),
        step=counts[_STEP],
        batches=counts[_BATCHES],
        steps=counts[_STEPS],
        data_s=seconds[_DATA_S],
        compute_s=seconds[_COMPUTE_S],
        communication_s=seconds[_COMMUNICATION_S],
        longest_s=seconds[_LONGEST_S],
    )

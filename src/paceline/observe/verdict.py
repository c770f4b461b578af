"""Who holds a run up: a verdict in one sentence, from what is known of every worker. Pure: no process is touched here."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.observe import formats
from paceline.world.status_page import OperationKind, Phase, Reading

_PACKAGE = Path(__file__).resolve().parents[1]
_TASKS = f"{_PACKAGE}/tasks/"
"""Built-in tasks stand where the user's own would."""
_LIBRARIES = (f"{_PACKAGE}/", "<", *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")))
_LIBRARY_FOLDERS = re.compile(r"/(site-packages|dist-packages|lib(64)?/python3\.\d+)/")
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_OPERATIONS = (
    "torch/distributed/distributed_c10d.py",
    "paceline/world/process_group.py",
    "paceline/world/pending.py",
)
"""Where a worker that is in an operation with others has come through."""
_IN_GATHERING = ("paceline/world/shared_memory.py", "paceline/strategies/fsdp/reduction.py")
"""Where a worker has come through that waits for the others in a call of a model, or in the backward pass of one."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_ACTIVITIES = {
    Phase.QUIET: "outside training",
    Phase.STARTING: "starting",
    Phase.DATA: "reading data",
    Phase.COMPUTE: "computing",
    Phase.COMMUNICATION: "waiting for the others",
    Phase.IDLE: "between steps",
    Phase.ENDED: "done",
    Phase.COMPILE: "compiling",
}
_STATES = {"R": ", running on", "D": ", blocked on a disk or a network file system"}


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that has begun and not ended."""

    number: int
    name: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.name} (collective {self.number})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvidence:
    """What is known of one worker at the moment of the verdict."""

    rank: int
    host: str
    reading: Reading
    silent_s: float
    """How long nothing has changed; a length of time, because clocks of two machines do not compare."""
    limit_s: float
    """How long it may stay silent where it is."""
    state: str = "S"
    """The state of the process as /proc tells it: R, S, D, T for stopped, X for gone."""
    threads: tuple[tuple[Frame, ...], ...] = ()
    """The stacks of its threads, the main thread's first, each from the innermost call out."""
    pending: tuple[Collective, ...] = ()

    @property
    def own_line(self) -> Frame | None:
        """The innermost line of the user's own code; where data are read, that may be in any thread."""
        threads = self.threads if self.reading.phase is Phase.DATA else self.threads[:1]
        return next((frame for thread in threads for frame in thread if is_users(frame)), None)

    @property
    def place(self) -> Frame | None:
        """Where it is: the user's own line if there is one, or else the innermost one of the main thread."""
        return self.own_line or next(iter(self.threads[0] if self.threads else ()), None)

    @property
    def waits(self) -> bool:
        """Return whether it waits for the others: by its own account, or in an operation that the user's code called."""
        main = self.threads[0] if self.threads else ()
        return self.reading.phase is Phase.COMMUNICATION or any(
            frame.file.endswith(_OPERATIONS) for frame in main
        )

    @property
    def trains(self) -> bool:
        """Return whether it takes part in training."""
        return self.reading.phase not in (Phase.QUIET, Phase.ENDED)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What holds the run up."""

    kind: str
    """stopped, stuck: replace `stuck`; deadlock: all wait and no one worker is to blame; shared: several stand still at once, so
    report it and wait; slow: nothing to do yet."""
    stuck: tuple[int, ...]
    sentence: str


def parse_stacks(text: str) -> tuple[tuple[Frame, ...], ...]:
    """Read a dump of faulthandler's: the stacks of all threads, the main thread's first.

    Python lists its threads from the youngest to the oldest, and the main thread is the oldest. Where there are more
    than it prints (100), the main thread is the one that took the signal: the kernel asks it first.
    """
    threads: list[list[Frame]] = []
    current = None
    for line in text.splitlines():
        if found := _THREAD.match(line):
            current = len(threads) if found[1] == "Current thread" else current
            threads.append([])
        elif threads and (found := _FRAME.match(line)):
            number = int(found["line"]) if found["line"].isdecimal() else 0
            threads[-1].append(Frame(found["file"], number, found["function"]))
    if not threads:
        return ()
    main = len(threads) - 1
    if len(threads) >= 100 and current is not None:
        main = current
    return tuple(tuple(threads[index]) for index in (main, *(i for i in range(len(threads)) if i != main)))


def is_users(frame: Frame) -> bool:
    """Return whether a call is in the user's code: not in paceline, an installed package, or the standard library."""
    if frame.file.startswith(_TASKS):
        return True
    return not frame.file.startswith(_LIBRARIES) and not _LIBRARY_FOLDERS.search(frame.file)


def judge(evidence: Sequence[WorkerEvidence]) -> Verdict:
    """Decide which workers hold the run up, from the evidence of all its workers.

    Only the odd one out is replaced, never more than half of them: several that stand still in the same phase wait for something
    that they share (a file server, a compiler), which ending them does not bring back.
    """
    everyone = sorted(evidence, key=lambda one: one.rank)
    if any(one.state in "XZTt" for one in everyone):
        return _judge_stopped(everyone)
    busy = [one for one in everyone if one.trains and not one.waits]
    waiting = [one for one in everyone if one.waits]
    late = [one for one in busy if one.silent_s >= one.limit_s]
    if late and _is_shared(late, everyone):
        return Verdict("shared", (), _unblamed(_stuck(late, everyone)))
    if late and not _spreads(late, busy):
        return Verdict("stuck", _ranks(late), _stuck(late, everyone))
    if busy:
        return Verdict("slow", (), _slow(busy))
    # Whoever is still in a step that somebody else has left cannot be waiting for that one.
    stepping = [one for one in waiting if one.reading.kind is OperationKind.STEP]
    latest = max((one.reading.step for one in stepping), default=0)
    behind = [one for one in stepping if one.reading.step < latest]
    if behind:
        return Verdict("stuck", _some(behind, everyone), _behind(behind, everyone))
    return Verdict("deadlock", (), _deadlock(waiting, [one for one in everyone if not one.trains]))


def _judge_stopped(everyone: Sequence[WorkerEvidence]) -> Verdict:
    """Decide where some are gone or stopped by a signal; whoever stops all of them may let all of them go on."""
    gone = [one for one in everyone if one.state in "XZ"]
    stopped = [one for one in everyone if one.state in "Tt"]
    sentence = _stopped(gone, stopped, everyone)
    if len(stopped) == len(everyone) > 1:
        return Verdict("shared", (), _unblamed(sentence))
    return Verdict("stopped", _some([*gone, *stopped], everyone), sentence)


def _is_shared(late: Sequence[WorkerEvidence], everyone: Sequence[WorkerEvidence]) -> bool:
    """Return whether those who are late are no odd ones out: two in the same phase, or more than half of all."""
    phases = [one.reading.phase for one in late]
    return len(set(phases)) < len(phases) or 2 * len(late) > len(everyone)


def _spreads(late: Sequence[WorkerEvidence], busy: Sequence[WorkerEvidence]) -> bool:
    """Return whether another one is about to be late in the same phase: a stall that all share is not seen on all at once."""
    phases = {one.reading.phase for one in late}
    others = [one for one in busy if one not in late and one.reading.phase in phases]
    return any(2 * one.silent_s >= one.limit_s for one in others)


def _some(blamed: Sequence[WorkerEvidence], everyone: Sequence[WorkerEvidence]) -> tuple[int, ...]:
    """Return the ranks to replace now: half of all at most. The next look finds the others where they still are."""
    return _ranks(blamed)[: max(1, len(everyone) // 2)]


def _unblamed(sentence: str) -> str:
    """Add what follows where the cause lies outside of the workers."""
    return f"{sentence.rstrip('.')}; nobody is replaced for what may come from outside, and the run waits (Ctrl-C ends it)."


def _stopped(
    gone: Sequence[WorkerEvidence], stopped: Sequence[WorkerEvidence], everyone: Sequence[WorkerEvidence]
) -> str:
    parts = []
    if gone:
        parts.append(f"{_who(gone)} {_be(gone)} gone")
    if stopped:
        parts.append(
            f"{_who(stopped)} {_be(stopped)} stopped (SIGSTOP) in {_operation(stopped[0])}, {_activity(stopped[0])}, "
            f"and {'has' if len(stopped) == 1 else 'have'} not moved for {_longest(stopped)}"
        )
    return "; ".join([*parts, _batches([*gone, *stopped], everyone)]) + "."


def _stuck(late: Sequence[WorkerEvidence], everyone: Sequence[WorkerEvidence]) -> str:
    others = [one for one in everyone if one.waits]
    if others:
        leading = max(others, key=lambda one: one.reading.step)
        called = f", {leading.pending[0]}" if leading.pending else ""
        fact = f"never entered {_exchange(leading)}{called}"
    else:
        fact = f"made no progress in {_operation(late[0])}"
    if len(late) == 1:
        where = f"for {_longest(late)} it has been {_place(late[0])}"
    else:
        where = f"for {_longest(late)} " + ", ".join(
            f"rank {one.rank} has been {_place(one)}" for one in late
        )
    return f"{_who(late)} {fact}: {where}; {_batches(late, everyone)}.{_gathering(late)}"


def _gathering(late: Sequence[WorkerEvidence]) -> str:
    """Name what workers wait for under fsdp that nobody is going to do."""
    files = {frame.file for one in late for thread in one.threads[:1] for frame in thread}
    if not all(any(file.endswith(place) for file in files) for place in _IN_GATHERING):
        return ""
    return (
        " It waits for the others under fsdp: do all workers call the model equally often in each batch, however their samples "
        "are?"
    )


def _behind(behind: Sequence[WorkerEvidence], everyone: Sequence[WorkerEvidence]) -> str:
    where = ", ".join(
        f"{_collective(one)}{_at(one)}"
        if len(behind) == 1
        else f"rank {one.rank} {_collective(one)}{_at(one)}"
        for one in behind
    )
    still = f"{_be(behind)} still in {_exchange(behind[0])}, which others have left"
    return f"{_who(behind)} {still}: for {_longest(behind)} {where}; {_batches(behind, everyone)}."


def _slow(busy: Sequence[WorkerEvidence]) -> str:
    slowest = max(busy, key=lambda one: one.silent_s / one.limit_s)
    return (
        f"the others wait for rank {slowest.rank} on {slowest.host}, which is {_place(slowest)} in {_operation(slowest)} "
        f"since {formats.duration(slowest.silent_s)} and has {formats.duration(slowest.limit_s)} for it."
    )


def _deadlock(waiting: Sequence[WorkerEvidence], left: Sequence[WorkerEvidence]) -> str:
    if not waiting:
        return "no worker takes part in training, so there is nobody to wait for."
    operations = list(dict.fromkeys(_operation(one) for one in waiting))
    operation = " and ".join(operations)
    where = ", ".join(
        f"rank {one.rank} {_collective(one)}{_at(one)}"
        + (f" in {_operation(one)}" if len(operations) > 1 else "")
        for one in waiting
    )
    if left:
        done = f"{_who(left)} {_be(left)} done with training"
        return f"{done}, but {_who(waiting)} still {_wait(waiting)} in {operation}: for {_longest(waiting)} {where}."
    if len(waiting) == 1:
        return (
            f"{_who(waiting)} waits for others in {operation} and is alone: for {_longest(waiting)} {where}."
        )
    return f"all {len(waiting)} ranks wait for each other in {operation}, for {_longest(waiting)}: {where}."


def _ranks(some: Iterable[WorkerEvidence]) -> tuple[int, ...]:
    return tuple(sorted(one.rank for one in some))


def _who(some: Sequence[WorkerEvidence]) -> str:
    if len(some) == 1:
        return f"rank {some[0].rank} on {some[0].host}"
    *first, last = (str(one.rank) for one in some)
    hosts = sorted({one.host for one in some})
    return f"ranks {', '.join(first)} and {last} on {', '.join(hosts)}"


def _be(some: Sequence[WorkerEvidence]) -> str:
    return "is" if len(some) == 1 else "are"


def _wait(some: Sequence[WorkerEvidence]) -> str:
    return "waits" if len(some) == 1 else "wait"


def _operation(one: WorkerEvidence) -> str:
    step = one.reading.step
    match one.reading.kind:
        case OperationKind.STEP:
            return f"step {step}"
        case OperationKind.EVALUATE:
            return f"the evaluation at step {step}"
        case OperationKind.SAVE:
            return f"the checkpoint of step {step}"
        case _:
            return f"what follows step {step}" if one.reading.operation else "the start"


def _exchange(one: WorkerEvidence) -> str:
    return ("the gradient reduction of " if one.reading.kind is OperationKind.STEP else "") + _operation(one)


def _activity(one: WorkerEvidence) -> str:
    return _ACTIVITIES[one.reading.phase]


def _place(one: WorkerEvidence) -> str:
    doing = f"{_activity(one)}{_STATES.get(one.state, '')}"
    return (
        f"at {one.place} ({doing})" if one.place else f"{doing} at a place unknown, since it showed no stack"
    )


def _collective(one: WorkerEvidence) -> str:
    return f"in {one.pending[0]}" if one.pending else "in an exchange"


def _at(one: WorkerEvidence) -> str:
    return f" at {one.own_line}" if one.own_line else ""


def _longest(some: Sequence[WorkerEvidence]) -> str:
    return formats.duration(max(one.silent_s for one in some))


def _batches(some: Sequence[WorkerEvidence], everyone: Sequence[WorkerEvidence]) -> str:
    ranks = _ranks(some)
    others = [one for one in everyone if one.rank not in ranks]
    served = f"{'it has' if len(some) == 1 else 'they have'} served {_range(some)} batches"
    return f"{served}, the others {_range(others)}" if others else served


def _range(some: Sequence[WorkerEvidence]) -> str:
    counts = [one.reading.batches for one in some]
    low, high = formats.count(min(counts)), formats.count(max(counts))
    return low if low == high else f"{low} to {high}"

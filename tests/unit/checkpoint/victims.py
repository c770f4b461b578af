"""Processes that are to die, or to lose their folder, at a moment that is counted and not timed."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import platform
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import run_state

KEEP = 2
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.unit.checkpoint.victims", "tests.unit.checkpoint.writer"])
_PTRACE = ctypes.CDLL(None).ptrace
_PTRACE.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_PTRACE.restype = ctypes.c_long
_TRACE_ME, _GO_TO_NEXT_CALL, _SET_OPTIONS = 0, 24, 0x4200
_MARK_CALLS, _DIE_WITH_TRACER = 0x1, 0x100000
_STOPPED_AT_CALL = signal.SIGTRAP | 0x80
_NO_TRACING = 77
_NUMBERS = {
    "x86_64": {"fsync": 74, "rename": 82, "mkdir": 83},
    "aarch64": {"fsync": 82, "rename": 38, "mkdir": 34},
}


def save_one(folder: Path, step: int, state: dict[str, Any] | None = None) -> str:
    """Save a step; give an empty text, or the line that says why that failed."""
    try:
        Checkpoints(folder, keep=KEEP).save(step, state or run_state(step))
    except CheckpointError as error:
        return str(error)
    return ""


def die_at_call(number: int, folder: Path, step: int) -> int | None:
    """Save a step in a process that is killed when it is about to enter the kernel for the given time.

    Gives how it ended, or None where the kernel lets nobody trace.
    """
    state = run_state(step)
    pid = os.fork()
    if pid == 0:
        if _trace(_TRACE_ME, 0, 0) != 0:
            os._exit(_NO_TRACING)
        os.kill(os.getpid(), signal.SIGSTOP)
        save_one(folder, step, state)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        return None
    _trace(_SET_OPTIONS, pid, _MARK_CALLS | _DIE_WITH_TRACER)
    entered, inside = 0, False
    while entered < number:
        _trace(_GO_TO_NEXT_CALL, pid, 0)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status)
        if os.WSTOPSIG(status) == _STOPPED_AT_CALL:
            inside = not inside
            entered += inside
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _trace(request: int, pid: int, data: int) -> int:
    return int(_PTRACE(request, pid, None, data))


def long_state(step: int) -> dict[str, Any]:
    """Give a state whose files are each larger than the one written before it."""
    return run_state(step) | {"meta": {"note": "x" * 4000}}


def changed_state(step: int) -> dict[str, Any]:
    """Return another state of the same step: the loop has changed the weights since it was saved."""
    return run_state(step) | {"model": run_state(step + 1)["model"]}


def die_at_byte(size: int, folder: Path, step: int) -> int:
    """Save a long state in a process that the kernel kills once a file has the given size and should grow."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        save_one(folder, step, long_state(step))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def lose_folder(number: int, doomed: Path, folder: Path, step: int) -> tuple[str, bool]:
    """Save a step while a folder above is deleted before the given operation; tell the outcome and whether it was."""
    seen = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event.startswith(("os.", "open", "shutil.")) and arguments and str(folder) in str(arguments[0]):
            seen += 1
            if seen == number:
                shutil.rmtree(doomed)

    return _in_a_fork(lambda: (sys.addaudithook(count), (save_one(folder, step), seen >= number))[1])


def replace_and_look(folder: Path, step: int, snapshots: Path) -> int:
    """Save a step of its own once more, and copy the folder as a death before each operation on it would leave it."""
    seen, looking = 0, False
    last: list[Path] = []

    def look(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen, looking, last
        if looking or not event.startswith(("os.", "open", "shutil.")):
            return
        if not any(str(folder) in str(one) for one in arguments):
            return
        looking = True
        if last != (last := sorted(folder.rglob("*"))):
            shutil.copytree(folder, snapshots / str(seen))
            seen += 1
        looking = False

    def save() -> int:
        checkpoints = Checkpoints(folder, keep=1)
        checkpoints.own.add(step)
        sys.addaudithook(look)
        checkpoints.save(step, changed_state(step))
        return seen

    return int(_in_a_fork(save))


def save_as_nobody(place: Path, step: int) -> str:
    """Save a step below a place as a user who owns nothing there."""

    def save() -> str:
        os.chdir(place)  # The folders above need not be open to that user.
        os.seteuid(65534)
        return save_one(Path("checkpoints"), step)

    return _in_a_fork(save)


def read_as_nobody(place: Path) -> list[str]:
    """Look for the newest checkpoint below a place as a user who owns nothing there, and give the reasons against."""
    reasons: list[str] = []

    def look() -> list[str]:
        os.chdir(place)
        os.seteuid(65534)
        assert Checkpoints(Path("checkpoints")).newest(lambda path, reason: reasons.append(reason)) is None
        return reasons

    return _in_a_fork(look)


def note_as_nobody(place: Path, step: int) -> str:
    """Save a step below a place as a user who owns nothing there, and give what was noted."""
    notes: list[str] = []

    def save() -> str:
        os.chdir(place)
        os.seteuid(65534)
        Checkpoints(Path("checkpoints"), keep=KEEP).save(step, run_state(step), note=notes.append)
        return "; ".join(notes)

    return _in_a_fork(save)


def save_with_failing(call: str, folder: Path, step: int) -> str | None:
    """Save a step while the kernel answers one call with an input/output error; None where it cannot."""
    number = _NUMBERS.get(platform.machine(), {}).get(call)
    return None if number is None else _in_a_fork(lambda: save_one(folder, step) if _forbid(number) else None)


def _forbid(number: int) -> bool:
    """Have every further call of this process with that number fail with EIO."""
    load_number, compare, answer = 0x20, 0x15, 0x06
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (load_number, 0, 0, 0),
            (compare, 0, 1, number),
            (answer, 0, 0, 0x00050000 | errno.EIO),
            (answer, 0, 0, 0x7FFF0000),
        )
    )
    memory = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(memory)))
    process_control = ctypes.CDLL(None).prctl
    no_new_privileges, seccomp, with_filter = 38, 22, 2
    process_control(no_new_privileges, 1, 0, 0, 0)
    return bool(process_control(seccomp, with_filter, ctypes.c_void_p(ctypes.addressof(head))) == 0)


def _in_a_fork(work: Callable[[], Any]) -> Any:
    receiving, sending = FORKSERVER.Pipe(duplex=False)
    with receiving, sending:
        pid = os.fork()
        if pid == 0:
            try:
                sending.send(work())
            except BaseException:  # noqa: BLE001 - a fork must not go on as if it were its parent
                traceback.print_exc()
            os._exit(0)
        sending.close()
        try:
            return receiving.recv()
        finally:
            os.waitpid(pid, 0)


def _serve(connection: Connection) -> None:
    with tempfile.TemporaryDirectory() as place:
        # Whatever is imported or opened at a first save is done before any victim is forked.
        for step in range(KEEP + 1):
            save_one(Path(place), step)
    while True:
        try:
            deed, arguments = connection.recv()
        except EOFError:
            return
        connection.send(deed(*arguments))


@contextmanager
def executioner() -> Iterator[Callable[..., Any]]:
    """Give a way to have deeds of this file done by one process whose forks start at once."""
    here, there = FORKSERVER.Pipe()
    process = FORKSERVER.Process(target=_serve, args=(there,))
    process.start()
    there.close()

    def have_done(deed: Callable[..., Any], *arguments: Any) -> Any:
        here.send((deed, arguments))
        assert here.poll(60), f"{deed.__name__} does not end"
        return here.recv()

    try:
        with here:
            yield have_done
        process.join(20)
    finally:
        process.kill()
        process.join()
        process.close()

"""What a test may leave behind: nothing. Finds processes, threads, files, variables and folders left over."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 20.0
"""How long an ending process or thread, or a shared-memory file of somebody else, may take to go."""
FORKED_WITHOUT_EXEC = 0x40
LONG_LIVED_COMMANDS = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "paceline.launch.workers.fork_server_process",
)
# What runs below it belongs to pages that run beside the tests; orphans of those come to us, and are seen then.
BESIDE = "tests/dist/docs/warm.py"
# Started with the first progress bar that torch's compiler shows, and there for the rest of the process.
LONG_LIVED_THREADS = ("tqdm_monitor",)
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
# Set by pytest itself, and by libraries when they are first imported, whichever test that falls into.
OTHERS_VARIABLES = ("PYTEST_", "HYPOTHESIS_", "KMP_", "TORCHINDUCTOR_", "TRITON_")


@dataclass(frozen=True, slots=True)
class Before:
    """What was there when the test began."""

    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    environment: dict[str, str]
    directory: str
    shared_memory: frozenset[str]


def look() -> Before:
    """Take stock of what could be left over."""
    return Before(
        processes=frozenset(descendants(os.getpid())),
        threads=frozenset(threading.enumerate()),
        environment=dict(os.environ),
        directory=os.getcwd(),  # noqa: PTH109
        shared_memory=frozenset(shared_memory()),
    )


def find(before: Before, temporary: Path | None) -> list[str]:
    """Name everything that is left over since then; what is about to end gets its time."""
    lasting = [
        *changed_variables(before.environment),
        *changed_directory(before.directory),
        *ended_interpreter(),
        *(open_files(temporary) if temporary is not None else []),
    ]
    deadline = time.monotonic() + GRACE_S
    while ending := [*left_processes(before), *left_threads(before), *left_shared_memory(before)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return lasting + ending


def descendants(pid: int) -> Iterator[int]:
    """Give every process below this one, however deep."""
    for task in _names(f"/proc/{pid}/task"):
        yield from started_by(pid, task)


def started_by(pid: int, task: str) -> Iterator[int]:
    """Give what one thread of a process has started, and what is below that."""
    for child in map(int, _read(f"/proc/{pid}/task/{task}/children").split()):
        yield child
        yield from descendants(child)


def beside(before: Before) -> Iterator[int]:
    """Give the processes of work that goes on beside the test: of the pages, and of threads older than the test."""
    own = os.getpid()
    for pid in descendants(own):
        if BESIDE in command(pid) and not is_forked(pid):
            yield from (pid, *descendants(pid))
    for thread in before.threads:
        if thread is not threading.main_thread() and thread.is_alive():
            yield from started_by(own, str(thread.native_id))


def new_processes(before: Before) -> list[int]:
    """Give the processes below this one that still run and are the test's own."""
    others = before.processes | set(beside(before))
    return [pid for pid in descendants(os.getpid()) if pid not in others and is_leak(pid)]


def left_processes(before: Before) -> list[str]:
    """Name the new processes below this one that still run."""
    return [f"process {pid} ({command(pid)}) still runs" for pid in new_processes(before)]


def is_leak(pid: int) -> bool:
    """Tell whether a process counts: it runs, and it is not one that serves many tests."""
    fields = status(pid)
    if not fields or fields[0] in "ZX":
        return False
    return is_forked(pid) or not any(name in command(pid) for name in LONG_LIVED_COMMANDS)


def is_forked(pid: int) -> bool:
    """Tell whether a process has its command line from another: a server came to be by exec, what it forks did not."""
    fields = status(pid)
    return bool(fields) and bool(int(fields[6]) & FORKED_WITHOUT_EXEC)


def status(pid: int) -> list[str]:
    """Give what the kernel tells of a process, from its state on; nothing if it is gone."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def command(pid: int) -> str:
    """Give the command line of a process in short."""
    return " ".join(_read(f"/proc/{pid}/cmdline").replace("\0", " ").split())[:200]


def left_threads(before: Before) -> list[str]:
    """Name the new threads that still run."""
    return [
        f"thread {thread.name!r} still runs"
        for thread in threading.enumerate()
        # A dummy stands for a thread of a library in C++ that once called Python: torch's, and it stays.
        if thread not in before.threads
        and not isinstance(thread, threading._DummyThread)
        and thread.name not in LONG_LIVED_THREADS
    ]


def open_files(folder: Path) -> list[str]:
    """Name the files below a folder that this process still holds open."""
    return [
        f"file {path} is still open" for path in _open_paths(os.getpid()) if path.startswith(f"{folder}/")
    ]


def changed_variables(before: dict[str, str]) -> list[str]:
    """Name the environment variables that are new, gone or different."""
    names = sorted(before.keys() | os.environ.keys())
    return [
        f"environment variable {name} was {before.get(name)!r} and is {os.environ.get(name)!r}"
        for name in names
        if before.get(name) != os.environ.get(name) and not name.startswith(OTHERS_VARIABLES)
    ]


def changed_directory(before: str) -> list[str]:
    """Say whether the current directory is another one, or is gone."""
    try:
        now = os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        now = "a folder that is gone"
    return [f"the current directory was {before} and is {now}"] if now != before else []


def ended_interpreter() -> list[str]:
    """Say whether what the interpreter runs at its end has run: torch's loaders then leave their processes behind."""
    flags = sys.modules.get("torch.utils.data._utils")
    return (
        ["the functions of the interpreter's end have run"]
        if getattr(flags, "python_exit_status", False)
        else []
    )


def shared_memory() -> list[str]:
    """Give the names in shared memory that belong to this user."""
    with os.scandir(SHARED_MEMORY) as entries:
        return [entry.name for entry in entries if _owner(entry) == os.geteuid()]


def left_shared_memory(before: Before) -> list[str]:
    """Name the new files in shared memory, but for those that only strangers' processes have in use."""
    new = [str(SHARED_MEMORY / name) for name in sorted(set(shared_memory()) - before.shared_memory)]
    if not new:
        return []
    ours = {os.getpid(), *descendants(os.getpid())} - set(beside(before))
    return [f"{path} is left" for path in new if not is_used_by_strangers(path, ours)]


def restore(before: Before) -> None:
    """Undo what would disturb the next test: variables, the directory, processes."""
    for name in os.environ.keys() - before.environment.keys():
        if not name.startswith(OTHERS_VARIABLES):
            del os.environ[name]
    os.environ.update(before.environment)
    os.chdir(before.directory)
    if ended_interpreter():
        sys.modules["torch.utils.data._utils"].python_exit_status = False  # type: ignore[attr-defined]
    for pid in new_processes(before):
        os.kill(pid, 9)


def is_used_by_strangers(path: str, ours: set[int]) -> bool:
    """Look through all other processes (slow, and only for a suspect): other runs may share this machine."""
    strangers = [int(name) for name in _names("/proc") if name.isdecimal() and int(name) not in ours]
    return any(path in _read(f"/proc/{pid}/maps") or path in _open_paths(pid) for pid in strangers)


def _open_paths(pid: int) -> list[str]:
    return [_link(f"/proc/{pid}/fd/{descriptor}") for descriptor in _names(f"/proc/{pid}/fd")]


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []


def _owner(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_uid
    except FileNotFoundError:
        return -1


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return ""

"""What a writer leaves behind when it dies: names that say whose it is, and its removal once nobody lives.

.step-200.partial-MACHINE-PID-START   being written
.step-50.removed-MACHINE-PID-START    being deleted, so that no committed name is ever half there
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

from paceline.checkpoint.durable import remove, sync
from paceline.checkpoint.manifest import OWN_FILE
from paceline.world.shared_memory import machine

UNTOUCHED_S = 3600.0
"""How long what another machine writes may lie still before it counts as left behind.

Its processes cannot be seen from here. The longest pause of a living writer is the hash of one file: half of
this for a terabyte.
"""


def beside(path: Path, purpose: Literal["partial", "removed"]) -> Path:
    """Name the hidden neighbour of a path under which this process writes or deletes it."""
    return path.with_name(f".{path.name}.{purpose}-{_writer()}")


def sweep(folder: Path, names: str, *, now: float, writing: Path | None = None) -> None:
    """Delete what dead writers left of the names that match, except what this process is `writing`.

    `now` is a time the disk gave: the clocks of the machines that share it may differ.
    """
    for path, name, purpose, writer in _leftovers(folder, names):
        if path == writing or not _is_dead(path, writer, now):
            continue
        if purpose == "removed" and path.is_dir():
            take_apart(path, path.with_name(name))
        else:
            remove(path)


def discard(path: Path) -> bool:
    """Delete a committed checkpoint: its name goes first, so that nobody sees half of it.

    Only what a checkpoint consists of is deleted. Return whether nothing is left under its name: what somebody else has put
    there stays there.
    """
    if not path.is_dir() or path.is_symlink():
        return not os.path.lexists(path)  # a link that leads nowhere takes the name all the same
    if not _own_files(path):
        return not _entries(path)
    doomed = beside(path, "removed")
    if doomed.is_dir():
        take_apart(doomed, path)
    with suppress(FileNotFoundError):  # Another writer deletes it too.
        path.rename(doomed)
    sync(path.parent)
    return take_apart(doomed, path)


def take_apart(doomed: Path, name: Path) -> bool:
    """Delete the files of a checkpoint that has lost its name; where more lies in the folder, give it the name back."""
    for file in _own_files(doomed):
        file.unlink(missing_ok=True)
    try:
        doomed.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        with suppress(OSError):  # Where the name is another checkpoint's by now, it stays as it is.
            doomed.rename(name)
        return False
    return True


def holds_others_files(folder: Path) -> bool:
    """Return whether a folder holds anything that no checkpoint consists of; False where it is gone."""
    return any(not _is_own(path) for path in _entries(folder))


def _is_own(path: Path) -> bool:
    return OWN_FILE.fullmatch(path.name) is not None and not path.is_dir()


def _own_files(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if _is_own(path)]


def _entries(folder: Path) -> list[Path]:
    """Return what a folder holds; nothing where it is gone."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _leftovers(folder: Path, names: str) -> Iterator[tuple[Path, str, str, str]]:
    pattern = re.compile(rf"\.(?P<name>{names})\.(?P<purpose>partial|removed)-(?P<writer>.+)")
    for path in sorted(folder.iterdir()):
        if found := pattern.fullmatch(path.name):
            yield path, found["name"], found["purpose"], found["writer"]


def _is_dead(path: Path, writer: str, now: float) -> bool:
    here, _, process = writer.partition("-")
    if writer == _writer():
        return True  # Ours from a save that failed, and we write something else now.
    if here == _machine() and (found := re.fullmatch(r"(\d+)-(\d+)", process)):
        return _started(int(found[1])) != int(found[2])
    try:
        touched = max(entry.lstat().st_mtime for entry in (path, *path.glob("*")))
    except FileNotFoundError:
        return False  # Its writer is at work on it this moment.
    return now - touched > UNTOUCHED_S


def _writer() -> str:
    return f"{_machine()}-{os.getpid()}-{_started(os.getpid())}"


@cache
def _machine() -> str:
    return hashlib.sha256(repr(machine()).encode()).hexdigest()[:8]


def _started(pid: int) -> int | None:
    """Return when a process started, since a number alone is soon another's; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0 if not Path("/proc/self").exists() and _answers(pid) else None
    # A zombie is dead to us: its parent may take its time to notice.
    return None if fields[0] in "ZX" else int(fields[19])


def _answers(pid: int) -> bool:
    """Return whether a process is there, on a system that says no more than that."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

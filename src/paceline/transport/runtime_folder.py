"""A folder that only this user may enter, for the Unix sockets of one launch. It goes with the launch."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from paceline.errors import InputError

_PREFIX = "paceline-run-"
_LOCK = "lock"
_LONGEST = 90
"""Linux takes 107 characters for a socket's path, its name in the folder included."""


class RuntimeFolder:
    """Made on construction; what launchers that were killed have left behind is deleted then, too.

    Processes that have no launcher in common share one by its `name`; it goes with the last of them.
    """

    def __init__(self, name: str | None = None) -> None:
        base = Path(tempfile.gettempdir())  # not XDG_RUNTIME_DIR, which goes when the user logs out
        if len(str(base)) > _LONGEST - 24 or not os.access(base, os.W_OK | os.X_OK):
            base = Path("/tmp")  # noqa: S108  (what is made in it is 0700 and of a random name)
        _sweep(base)
        try:
            self.path, self._lock = _make(base) if name is None else _share(base / f"{_PREFIX}{name}")
        except OSError as error:
            raise InputError(
                f"no folder for the workers' sockets can be made in {base}: {error.strerror}. Free some space there, or set "
                "TMPDIR to another folder."
            ) from None

    def address(self, name: str) -> str:
        """Return the address of a socket in it."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Delete it, unless another process shares it."""
        with suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _make(base: Path) -> tuple[Path, int]:
    """Return a folder and its lock; one that was taken for left behind before it was locked is made anew."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))  # 0700
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            path.rmdir()
            raise
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path, lock
        os.close(lock)


def _share(path: Path) -> tuple[Path, int]:
    """Return the folder of that name and a lock on it beside those of others; whoever comes first makes it."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        about = path.lstat()
        if (
            about.st_uid != os.getuid()
            or stat.S_IMODE(about.st_mode) != 0o700
            or not stat.S_ISDIR(about.st_mode)
        ):
            raise InputError(
                f"{path} is there already and is not a folder of this user's alone. Remove it, or set TMPDIR to another folder."
            )
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # who left last has just deleted it
            continue
        fcntl.flock(lock, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), (path / _LOCK).stat()):
                return path, lock
        os.close(lock)


def _sweep(base: Path) -> None:
    """Delete the folders of this user whose launcher is gone: nobody holds their lock."""
    with suppress(OSError):
        for left in base.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                if left.lstat().st_uid == os.getuid() and left.is_dir() and not left.is_symlink():
                    _delete_unlocked(left)


def _delete_unlocked(folder: Path) -> None:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)

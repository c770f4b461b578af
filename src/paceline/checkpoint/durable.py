"""Files that are on the disk when we say so, and an error that names the path when they are not."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.file_record import FileRecord
from paceline.checkpoint.formats import FORMATS
from paceline.documents import DocumentError, open_regular
from paceline.errors import CheckpointError, DiskFaultError


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_and_hash(path: Path) -> FileRecord:
    """Bring a finished file to the disk and say what it is."""
    sync(path)
    return hash_file(path)


def hash_file(path: Path) -> FileRecord:
    """Return what a finished file is."""
    with open_regular(path) as file:
        return FileRecord(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def verify(path: Path, expected: FileRecord, *, content: bool = True) -> None:
    """Raise CheckpointError with the bare reason unless the file is the one that was recorded, in length and `content`."""
    try:
        with open_regular(path) as file:
            missing = expected.size - os.fstat(file.fileno()).st_size
            if missing:
                fault = f"{missing} bytes short" if missing > 0 else f"{-missing} bytes too long"
                raise CheckpointError(f"{path.name} is {fault}")
            if content and hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                raise CheckpointError(f"{path.name}: sha256 differs")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror})") from error
    except DocumentError as error:
        raise CheckpointError(f"{path.name} {error}") from error


def remove(path: Path) -> None:
    """Delete a file or a whole folder; one that is not there, or that others delete or write into, is fine."""
    while path.is_dir() and not path.is_symlink():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
    with suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()


class discarding:  # noqa: N801  (read as a word in a `with`)
    """Leave nothing of `partial` behind when the block fails.

    No generator: with Python 3.12 its frame and the exception that passes it hold each other, and all that a failed save held
    waits for the garbage collector.
    """

    def __init__(self, partial: Path) -> None:
        self._partial = partial

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Remove it if the block has failed."""
        if error is not None:
            try:
                remove(self._partial)
            except OSError:
                error.add_note(f"{self._partial} could not be removed either")


class committing(discarding):  # noqa: N801
    """Do the same, and make a DiskFaultError of a failing disk."""

    def __init__(self, partial: Path, final: Path) -> None:
        super().__init__(partial)
        self._final = final

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Remove it if the block has failed, and say so if the disk has."""
        super().__exit__(kind, error, _)
        message = None if error is None else disk_fault(error, self._final)
        if message is not None:
            raise DiskFaultError(message) from error


def disk_fault(error: BaseException, final: Path) -> str | None:
    """Return one line that says that the disk did not take a checkpoint, if that is what an exception is about."""
    reason = _disk_reason(error)
    if reason is None:
        return None
    return (
        f"cannot write {final}: {reason}. Nothing that was saved before was touched; "
        "make room there, or choose another folder."
    )


def _disk_reason(error: BaseException) -> str | None:
    """Find the failing disk behind an exception, if that is what it was."""
    if isinstance(error, tuple(one.error for one in FORMATS.values())):
        number = re.search(r"\(os error (\d+)\)", str(error))
        return os.strerror(int(number[1])) if number else str(error)
    # torch.save hides a failed write behind a RuntimeError about positions in the archive.
    cause = error.__context__ if isinstance(error, RuntimeError) else error
    return (cause.strerror or str(cause)) if isinstance(cause, OSError) else None

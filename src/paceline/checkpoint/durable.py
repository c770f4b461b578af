"""Files that are on the disk when we say so, and an error that names the path when they are not."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from paceline.errors import CheckpointError


class FileRecord(NamedTuple):
    """What a file must be to count as undamaged."""

    size: int
    sha256: str


def sync(path: Path) -> None:
    """Have the disk hold a file's bytes, or a folder's names, before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(path: Path) -> FileRecord:
    """Bring a finished file to the disk and say what it is."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return FileRecord(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def verify(path: Path, expected: FileRecord) -> None:
    """Raise CheckpointError with the bare reason unless the file is the one that was sealed."""
    try:
        with path.open("rb") as file:
            missing = expected.size - os.fstat(file.fileno()).st_size
            if missing:
                fault = f"{missing} bytes short" if missing > 0 else f"{-missing} bytes too long"
                raise CheckpointError(f"{path.name} is {fault}")
            if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                raise CheckpointError(f"{path.name}: sha256 differs")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror})") from error


def remove(path: Path) -> None:
    """Delete a file or a whole folder; one that is not there, or that others delete too, is fine."""
    while path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
    with suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()


@contextmanager
def committing(partial: Path, final: Path) -> Iterator[None]:
    """Leave nothing of `partial` behind when the block fails; a failing disk becomes a CheckpointError."""
    try:
        yield
    except BaseException as error:
        try:
            remove(partial)
        except OSError:
            error.add_note(f"{partial} could not be removed either")
        reason = _disk_fault(error)
        if reason is None:
            raise
        raise CheckpointError(
            f"cannot write {final}: {reason}. Nothing that was saved before was touched; "
            "make room there, or choose another folder."
        ) from error


def caused_by_disk(error: CheckpointError) -> bool:
    """Tell whether a save failed because of the disk: the next one may succeed, and a run can go on until then."""
    return error.__cause__ is not None and _disk_fault(error.__cause__) is not None


def _disk_fault(error: BaseException) -> str | None:
    """Find the failing disk behind an exception, if that is what it was."""
    if isinstance(error, SafetensorError):
        number = re.search(r"\(os error (\d+)\)", str(error))
        return os.strerror(int(number[1])) if number else str(error)
    # torch.save hides a failed write behind a RuntimeError about positions in the archive.
    cause = error.__context__ if isinstance(error, RuntimeError) else error
    return (cause.strerror or str(cause)) if isinstance(cause, OSError) else None

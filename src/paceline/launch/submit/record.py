"""What a run folder keeps of the job that was submitted for it, so that none is submitted twice. Imports no torch."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote

from paceline import documents
from paceline.errors import InputError

NAME = "job.json"
_NUMBER = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One job."""

    on: str
    name: str
    id: str | None = None
    """The number that the batch system gave it; None while it is being submitted."""

    def write(self, folder: Path) -> None:
        """Put it in place of what the folder keeps."""
        partial = folder / f".{NAME}.partial"
        partial.write_text(json.dumps(asdict(self)) + "\n")
        partial.replace(folder / NAME)

    def claim(self, folder: Path) -> None:
        """Put it into a folder that has none; raise InputError where somebody else was faster."""
        try:
            descriptor = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            raise InputError(
                f"another command submits {folder} at this moment. `paceline status {quote(str(folder))}` shows its job."
            ) from None
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(asdict(self)) + "\n")

    def retire(self, folder: Path) -> None:
        """Keep it under another name, because its job is over."""
        try:
            (folder / NAME).rename(folder / f"job-{self.id}.json")
        except FileNotFoundError:
            raise InputError(f"another command submits {folder} at this moment.") from None


def is_number(text: str) -> bool:
    """Return whether this is the number of one job: programs of SLURM's take other words for options, or for many jobs."""
    return _NUMBER.fullmatch(text) is not None


def _check_number(job: str | None) -> None:
    if job is not None and not is_number(job):
        raise documents.DocumentError(f"id is {documents.shown(job)}, but must be the number of a job")


def find(folder: Path) -> JobRecord | None:
    """Return the job that was submitted for a run; None where none was."""
    try:
        found = documents.read_object(folder / NAME)
        documents.check_fields(found, JobRecord)
        _check_number(found.get("id"))
        return JobRecord(**found)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, documents.DocumentError, TypeError) as error:
        raise InputError(
            f"{folder / NAME} cannot be read ({error}). Remove it when no job uses {folder}."
        ) from None


def read(folder: Path) -> tuple[JobRecord, str]:
    """Return the job of a run and its number; raise InputError where there is none."""
    found = find(folder)
    if found is None:
        raise InputError(f"no job was submitted for {folder}. Give the --out folder of a `paceline submit`.")
    if found.id is None:
        raise unfinished(folder, found)
    return found, found.id


def unfinished(folder: Path, found: JobRecord) -> InputError:
    """Return what is said of a job of which nobody knows whether it was submitted."""
    return InputError(
        f"a `paceline submit` was ended while it submitted {folder}. {what_to_do(folder, found)}"
    )


def what_to_do(folder: Path, found: JobRecord) -> str:
    """Return what is to be done where nobody knows whether there is a job."""
    return (
        f"So nobody knows whether there is a job. Look for {found.name} with `squeue --me --name {quote(found.name)}`, cancel "
        f"what is there, and remove {folder / NAME}."
    )

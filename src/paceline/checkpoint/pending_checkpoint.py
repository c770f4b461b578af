"""A checkpoint that is being written: a hidden folder, a part from each writer, and markers that say which are done.

.step-200.partial-...  part-0.safetensors  part-1.safetensors  part-1.json  extra_state.pt

A done-marker (part-1.json) is left by a worker when its part is on the disk, or when it could not be written, so that nobody
needs to talk to anybody while the parts are written beside the training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.durable import disk_fault, remove, sync, sync_and_hash
from paceline.checkpoint.extra_state import write_extra_state
from paceline.checkpoint.file_record import FileRecord
from paceline.checkpoint.formats import FORMATS, WRITTEN
from paceline.checkpoint.manifest import EXTRA_STATE
from paceline.errors import CheckpointError, DiskFaultError
from paceline.world import fault_points

_ERRNO = ".errno-"


@dataclass(frozen=True)
class Fault:
    """What went wrong with a save, in one line; empty if nothing did."""

    message: str = ""
    disk: bool = False
    """Whether it was the disk: the next save may succeed, and a run can go on until then."""

    def __bool__(self) -> bool:
        return bool(self.message)

    @classmethod
    def of(cls, error: CheckpointError) -> Fault:
        """Return what an error was."""
        return cls(str(error), isinstance(error, DiskFaultError))

    def error(self) -> CheckpointError:
        """Make an error of it again."""
        return (DiskFaultError if self.disk else CheckpointError)(self.message)


@dataclass(frozen=True)
class PendingCheckpoint:
    """The folder of a checkpoint that is being written, under the name of the process that will commit it."""

    final: Path
    partial: Path
    replaces: bool
    """Whether a checkpoint with another state may be there already: one of this run's own."""

    def make(self) -> None:
        """Make the empty folder, and those above it."""
        _make_folder(self.final.parent)
        remove(self.partial)
        self.partial.mkdir()

    def part(self, number: int) -> Path:
        """Name the file of one part."""
        return self.partial / FORMATS[WRITTEN].part.format(number)

    def write_part(self, number: int, tensors: Mapping[str, Tensor]) -> FileRecord:
        """Write one part, and return what its file is; the disk may not hold it yet."""
        record = FORMATS[WRITTEN].write_part(self.part(number), tensors)
        fault_points.hit(fault_points.CHECKPOINT)
        return record

    def complete(
        self, parts: Mapping[int, FileRecord], extra_state: Mapping[str, Any]
    ) -> dict[str, FileRecord]:
        """Write what is no tensor of model and optimizer; return all files, those of the `parts` first."""
        write_extra_state(self.partial, extra_state)
        files = {self.part(number).name: parts[number] for number in range(len(parts))}
        return {**files, EXTRA_STATE: sync_and_hash(self.partial / EXTRA_STATE)}

    # Done-markers: how writers that do not talk tell each other.

    def mark_done(self, number: int, record: FileRecord | None, fault: Fault) -> None:
        """Leave word that a part is on the disk, or why it is not."""
        content = {"fault": fault.message, "disk": fault.disk} if record is None else record._asdict()
        try:
            if record is None:
                remove(self.part(number))  # what did not fit makes room for saying so
            self._leave(number, content)
        except FileNotFoundError:
            return  # the folder is gone: the save was given up
        except OSError as error:
            try:
                # No room for words either: the name of an empty file says why.
                (self.partial / f"part-{number}{_ERRNO}{error.errno}").touch()
            except OSError:
                remove(self.partial)  # whoever waits for it must not wait for ever

    def _leave(self, number: int, content: dict[str, Any]) -> None:
        hidden = self.partial / f".part-{number}.json"
        with hidden.open("w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(self.partial / f"part-{number}.json")
        sync(self.partial)

    def done_parts(self) -> dict[int, FileRecord]:
        """Return the parts that are on the disk; raise what a writer says went wrong."""
        found = {}
        for name in os.listdir(self.partial):  # noqa: PTH208  (asks a network disk anew, where exists() may not)
            if name.startswith("part-") and _ERRNO in name:
                number = int(name.partition(_ERRNO)[2])
                raise DiskFaultError(disk_fault(OSError(number, os.strerror(number)), self.final))
            if name.startswith("part-") and name.endswith(".json"):
                content = json.loads((self.partial / name).read_bytes())
                if "fault" in content:
                    raise Fault(content["fault"], content["disk"]).error()
                found[int(name[len("part-") : -len(".json")])] = FileRecord(**content)
        return found

    def remove_markers(self) -> None:
        """Remove the done-markers, which the manifest replaces."""
        for path in self.partial.glob("part-*.json"):
            path.unlink()


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that the disk knows each by its name."""
    missing = [place for place in (folder, *folder.parents) if not place.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync(place.parent)

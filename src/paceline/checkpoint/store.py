"""The checkpoints of a run: each is committed whole by one rename, and the newest whole one is found.

checkpoints/
  step-100/ model.safetensors  optimizer.pt  manifest.json
  .step-200.partial-...        being written, and .step-50.removed-... being deleted: see leftovers.py
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.compare import same
from paceline.checkpoint.durable import committing, remove, seal, sync
from paceline.checkpoint.leftovers import beside, sweep
from paceline.checkpoint.manifest import MODEL, OPTIMIZER, Manifest
from paceline.checkpoint.read import Loaded, read, seems_whole
from paceline.checkpoint.tensors import plain, untie, write_model
from paceline.errors import CheckpointError, InputError
from paceline.world import points

_COMMITTED = r"step-(\d+)"
# What a rename says whose target is a folder with something in it, or a file.
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_KEPT_ELSEWHERE = ("model", "position", "meta")


class Checkpoints:
    """The `checkpoints/` folder of one run; any number read, and a second writer of the same run does no harm."""

    def __init__(self, folder: Path, *, keep: int = 3) -> None:
        if keep < 1:
            raise InputError(f"keep={keep} would keep no checkpoint. Use 1 or more.")
        self.folder = folder
        self.keep = keep

    def committed(self) -> list[Path]:
        """Give the folders of all committed checkpoints, the oldest step first, whole or damaged."""
        try:
            names = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot be read as a folder of checkpoints: {error.strerror}. "
                "Choose another folder."
            ) from error
        steps = sorted((int(found[1]), name) for name in names if (found := re.fullmatch(_COMMITTED, name)))
        return [self.folder / name for _, name in steps]

    def save(self, step: int, state: Mapping[str, Any], *, note: Callable[[str], None] | None = None) -> Path:
        """Commit the state of a run under a step, then delete all but the last `keep` checkpoints.

        A step that is there already with the same state stays as it is; a damaged one is replaced. A save that fails
        raises CheckpointError, and `caused_by_disk` tells whether the next one may succeed. What cannot be deleted
        after the commit goes to `note` as one line; without a `note` that is a CheckpointError too.
        """
        final = self.folder / f"step-{step}"
        rest = {key: plain(value, key) for key, value in state.items() if key not in _KEPT_ELSEWHERE}

        def is_there() -> bool:
            return _holds(final, state["position"], {"model": state["model"], **rest})

        partial = beside(final, "partial")
        with committing(partial, final):
            if is_there():
                return final
            try:
                self._write(partial, step, state, rest)
                self._publish(partial, final, is_there)
            except Exception:
                if partial.exists() or final.exists():
                    raise
                # Somebody removed the folder while we wrote into it: once more, into a new one.
                self._write(partial, step, state, rest)
                self._publish(partial, final, is_there)
        self._prune(final, note)
        return final

    def newest(self, report: Callable[[Path, str], None]) -> Loaded | None:
        """Read the newest whole checkpoint; each damaged one above it goes to `report` with the reason."""
        damaged: set[Path] = set()
        while paths := [path for path in self.committed() if path not in damaged]:
            newest = paths[-1]
            try:
                return read(newest)
            except CheckpointError as error:
                # One that is gone was deleted while we read, by a writer that had committed a newer one: look again.
                if newest in self.committed():
                    damaged.add(newest)
                    report(newest, str(error))
        return None

    def _write(self, partial: Path, step: int, state: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        _make_folder(self.folder)
        remove(partial)
        partial.mkdir()
        # What the dead left may be what fills the disk. What of it cannot be deleted is told after the commit.
        with suppress(OSError):
            sweep(self.folder, _COMMITTED, now=partial.stat().st_mtime, writing=partial)
        model, aliases = untie(state["model"])
        write_model(partial / MODEL, model, {"format": "pt"})
        points.reach(points.CHECKPOINT)
        with (partial / OPTIMIZER).open("wb") as file:
            torch.save(rest, file)
        Manifest(
            step=step,
            position=dict(state["position"]),
            meta=dict(state["meta"]),
            aliases=aliases,
            files={name: seal(partial / name) for name in (MODEL, OPTIMIZER)},
        ).write(partial)
        sync(partial)

    def _publish(self, partial: Path, final: Path, is_there: Callable[[], bool]) -> None:
        while True:
            try:
                partial.rename(final)
                break
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
            if is_there():
                # Another writer of the same run was faster, a machine that was cut off say.
                remove(partial)
                break
            _discard(final)
        sync(self.folder)

    def _prune(self, just_written: Path, note: Callable[[str], None] | None) -> None:
        """Delete what is older than the last `keep` whole ones; the damaged ones above them do not count."""
        kept = 0
        try:
            for path in reversed(self.committed()):
                if kept < self.keep:
                    kept += path == just_written or seems_whole(path)
                elif path != just_written:
                    _discard(path)
            sweep(self.folder, _COMMITTED, now=just_written.stat().st_mtime)
        except FileNotFoundError:
            return  # Somebody removed the folder, and so nothing is left to delete.
        except OSError as error:
            message = (
                f"{just_written} is safe, but what is left of an old one beside it could not be deleted "
                f"({error.strerror}: {error.filename}). Delete it by hand."
            )
            if note is None:
                raise CheckpointError(message) from error
            note(message)


def _holds(final: Path, position: Mapping[str, int], given: Mapping[str, Any]) -> bool:
    if not final.exists():
        return False
    try:
        existing = read(final)
    except CheckpointError:
        # Damaged: a run that resumed from an earlier step has come here again and puts it right.
        return False
    if existing.position == position and same(given, {key: existing.state.get(key) for key in given}):
        return True
    raise CheckpointError(
        f"{final} is there already and holds another state. Resume that run, or choose another folder."
    )


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that the disk knows each by its name."""
    missing = [place for place in (folder, *folder.parents) if not place.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync(place.parent)


def _discard(path: Path) -> None:
    """Delete a committed checkpoint: its name goes first, so that nobody sees half of it."""
    doomed = beside(path, "removed")
    remove(doomed)
    with suppress(FileNotFoundError):  # Another writer deletes it too.
        path.rename(doomed)
    sync(path.parent)
    remove(doomed)

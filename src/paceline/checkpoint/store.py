"""The checkpoints of a run: each is committed whole by one rename, and the newest whole one is found.

checkpoints/
  step-100/ model.safetensors  optimizer.pt  manifest.json
  .step-200.partial-PID/       being written; whoever finds it after that process died removes it
  .step-50.removed-PID/        being deleted, so that no committed name is ever half there
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.compare import same
from paceline.checkpoint.durable import committing, remove, seal, sync
from paceline.checkpoint.manifest import MODEL, OPTIMIZER, Manifest
from paceline.checkpoint.read import Loaded, read
from paceline.checkpoint.tensors import plain, untie, write_model
from paceline.errors import CheckpointError, InputError

_COMMITTED = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"\.step-\d+\.(?:partial|removed)-(\d{1,9})")


class Checkpoints:
    """The `checkpoints/` folder of one run; one process at a time writes to it, any number read."""

    def __init__(self, folder: Path, *, keep: int = 3) -> None:
        if keep < 1:
            raise InputError(f"keep={keep} would keep no checkpoint. Use 1 or more.")
        self.folder = folder
        self.keep = keep

    def committed(self) -> list[Path]:
        """Give the folders of all committed checkpoints, the oldest step first, whole or damaged."""
        return [path for _, path in sorted((int(found[1]), path) for found, path in self._match(_COMMITTED))]

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Commit the state of a run under a step, then delete all but the last `keep` checkpoints.

        A step that is there already with the same state stays as it is; a damaged one is replaced.
        """
        final = self.folder / f"step-{step}"
        rest = {
            key: plain(value, key) for key, value in state.items() if key not in {"model", "position", "meta"}
        }
        if self._already_holds(final, state["position"], {"model": state["model"], **rest}):
            return final
        model, aliases = untie(state["model"])
        partial = self.folder / f".{final.name}.partial-{os.getpid()}"
        with committing(partial, final):
            self._make_empty(partial)
            write_model(partial / MODEL, model, {"format": "pt"})
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
            if final.exists():
                _discard(final)
            partial.rename(final)
            sync(self.folder)
        self._prune(final)
        return final

    def newest(self, report: Callable[[Path, str], None]) -> Loaded | None:
        """Read the newest whole checkpoint; each damaged one above it goes to `report` with the reason."""
        for path in reversed(self.committed()):
            try:
                return read(path)
            except CheckpointError as error:
                report(path, str(error))
        return None

    def _already_holds(self, final: Path, position: Mapping[str, int], given: Mapping[str, Any]) -> bool:
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

    def _make_empty(self, partial: Path) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            sync(self.folder.parent)
        remove(partial)
        partial.mkdir()

    def _prune(self, just_written: Path) -> None:
        try:
            for path in self.committed()[: -self.keep]:
                if path != just_written:
                    _discard(path)
            for found, path in self._match(_LEFTOVER):
                # Our own number, and we are not writing: an earlier process had it, in a container say.
                if int(found[1]) == os.getpid() or not _is_alive(int(found[1])):
                    remove(path)
        except OSError as error:
            raise CheckpointError(
                f"{just_written} is safe, but an old checkpoint beside it could not be deleted "
                f"({error.strerror}: {error.filename}). Delete it by hand."
            ) from error

    def _match(self, pattern: re.Pattern[str]) -> Iterator[tuple[re.Match[str], Path]]:
        try:
            paths = sorted(self.folder.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot be read as a folder of checkpoints: {error.strerror}. "
                "Choose another folder."
            ) from error
        for path in paths:
            if found := pattern.fullmatch(path.name):
                yield found, path


def _discard(path: Path) -> None:
    """Delete a committed checkpoint: its name goes first, so that nobody sees half of it."""
    doomed = path.with_name(f".{path.name}.removed-{os.getpid()}")
    remove(doomed)
    path.rename(doomed)
    sync(path.parent)
    remove(doomed)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

"""How far a run is, as its folder tells it. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.documents import DocumentError, fits, open_regular
from paceline.observe.events import RunFailed, RunFinished, StepFinished
from paceline.training.folder import EVENTS, newest_step

_TAIL = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """How far a run is."""

    step: int | None
    """The newest step in its events."""
    saved: int | None
    """The step of its newest checkpoint."""
    ended: str | None
    """run_finished or run_failed, where its last event is one of these."""


def read_progress(folder: Path) -> RunProgress:
    """Read the end of a run's events; a folder without any has got nowhere."""
    step: int | None = None
    ended: str | None = None
    for line in _last_lines(folder / EVENTS):
        try:
            event = json.loads(line)
            kind = event["kind"]
        except (ValueError, LookupError, TypeError, RecursionError):
            continue  # cut off, being written, or none of ours
        ended = kind if kind in (RunFinished.kind, RunFailed.kind) else None
        if kind == StepFinished.kind and fits(event.get("step"), int):
            step = event["step"]
    return RunProgress(step=step, saved=newest_step(folder), ended=ended)


def _last_lines(path: Path) -> list[bytes]:
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            return file.read().splitlines()
    except (OSError, DocumentError):
        return []

"""The run folder as a launcher sees it: whether it may be used, and the spec in it. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import InputError
from paceline.training.options import RunOptions

CHECKPOINTS = "checkpoints"
SPEC = "spec.json"
EVENTS = "events.jsonl"


def has_run(folder: Path) -> bool:
    """Say whether a folder holds a checkpoint."""
    return any((folder / CHECKPOINTS).glob("step-*"))


def check(options: RunOptions) -> None:
    """Refuse a folder that holds a run already, and a resume where there is nothing."""
    if options.out is None:
        return
    there = has_run(options.out)
    if not options.resume and (there or (options.out / EVENTS).exists()):
        how = (
            "Add --resume to go on with it, or choose"
            if there
            else "It has no checkpoint to go on from: choose"
        )
        raise InputError(f"{options.out} already holds a run. {how} another --out.")
    if options.resume and not there:
        raise InputError(
            f"--resume: there is no checkpoint in {options.out}. Leave --resume out to start a run there."
        )


def write_spec(folder: Path, spec: Mapping[str, Any]) -> None:
    """Record what a run was asked to do."""
    partial = folder / f".{SPEC}.partial-{os.getpid()}"
    partial.write_text(json.dumps(spec, indent=1, default=str) + "\n")
    partial.replace(folder / SPEC)


def read_spec(folder: Path) -> dict[str, Any]:
    """Give what a run was asked to do; nothing where no launcher wrote it."""
    try:
        spec: dict[str, Any] = json.loads((folder / SPEC).read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(
            f"{folder / SPEC} is damaged ({error}). Remove it and give all options again."
        ) from error
    return spec

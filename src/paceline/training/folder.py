"""The run folder as a launcher sees it: whether it may be used, and the spec in it. Imports no torch."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import documents
from paceline.errors import InputError
from paceline.training.options import RunOptions
from paceline.training.spec import OVERRIDES, TrainSpec
from paceline.world import env

BUSY = "another launch is at work in {}. Wait for its end, or choose another --out."
CHECKPOINTS = "checkpoints"
SPEC = "spec.json"
EVENTS = "events.jsonl"
PROFILE = "profile"
FILES: Mapping[str, tuple[str, ...]] = {
    ".": (SPEC, EVENTS, "receipt.json", "workers.json", "metrics.csv"),
    "logs": ("rank-*.log", "sinks.log"),
    "sinks": ("wandb", "mlflow"),
    "ledger": ("rank-*-from-*.bin",),
    "tensorboard": ("events.out.tfevents.*",),
    PROFILE: ("trace.json", "table.txt"),
    CHECKPOINTS: (),
}
"""Every file that a launch and its workers write before there is a checkpoint, by the folder that it is in."""


def new_folder(name: str, parent: Path = Path("runs")) -> Path:
    """Return runs/NAME-TIME, with a number after it when that is taken.

    Every rank of a world that somebody else started must come to the same name, whatever its clock says, and whichever of them
    has made a folder yet: there the number is how often this process was given the name.
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")
    identity = env.identity()
    if identity is not None:
        of_world = parent / f"{plain}-{env.read('TORCHELASTIC_RUN_ID') or 'world'}-{identity.master_port}"
        _given[of_world] += 1
        return _numbered(of_world, _given[of_world])
    first = parent / f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    chosen, number = first, 1
    while chosen.exists():
        number += 1
        chosen = _numbered(first, number)
    return chosen


_given: Counter[Path] = Counter()
"""How often this process was given a name for a run of a world that somebody else started."""


def _numbered(folder: Path, number: int) -> Path:
    return folder if number == 1 else folder.with_name(f"{folder.name}-{number}")


def has_run(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint."""
    return any((folder / CHECKPOINTS).glob("step-*"))


def newest_step(folder: Path | None) -> int | None:
    """Return the step of the newest checkpoint in a folder, if there is one."""
    return max(steps(folder), default=None)


def steps(folder: Path | None) -> list[int]:
    """Return the steps of the checkpoints in a folder."""
    found = [] if folder is None else (folder / CHECKPOINTS).glob("step-*")
    names = [path.name.removeprefix("step-") for path in found]
    return [int(name) for name in names if name.isdecimal()]


def check(options: RunOptions) -> None:
    """Refuse a folder that holds a run already, and a resume where there is nothing."""
    if options.out is None:
        return
    _check_kinds(options.out)
    out, saved = options.out, has_run(options.out)
    begun = saved or (out / EVENTS).exists()
    if begun is not saved and is_busy(out):
        raise InputError(BUSY.format(out))
    unsaved = f"the run in {out} has saved no checkpoint, so it cannot be gone on with. Choose another --out, or delete {out}."
    if not options.resume and begun:
        raise InputError(
            f"{out} already holds a run. Add --resume to go on with it, or choose another --out."
            if saved
            else unsaved
        )
    if options.resume and not saved:
        raise InputError(
            f"--resume: {unsaved}"
            if begun
            else f"--resume: there is no run in {out}. Leave --resume out to start one there."
        )


def is_busy(folder: Path) -> bool:
    """Return whether a launch has locked a run folder; False where this disk has no locks."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def check_resumed(options: RunOptions) -> None:
    """Refuse a resume where there is nothing, before anything is told of it; another machine may hold what a follower has not."""
    if options.resume and options.rendezvous is None:
        check(options)


def _check_kinds(out: Path) -> None:
    """Refuse a folder where something else lies under the name of a file, or of a folder, that a run writes."""
    for name, patterns in FILES.items():
        place = out / name
        if name != "." and place.exists() and not place.is_dir():
            raise _cannot_write(place, "no folder")
        for path in sorted(path for pattern in patterns for path in place.glob(pattern)):
            if path.exists() and not path.is_file():
                raise _cannot_write(path, "no regular file")


def _cannot_write(path: Path, words: str) -> InputError:
    return InputError(
        f"{path} is {words}, so the run cannot be written there. Move it away, or choose another --out."
    )


def write_spec(folder: Path, spec: Mapping[str, Any]) -> None:
    """Record what a run was asked to do."""
    replace_spec(folder, (json.dumps(spec, indent=1, default=str) + "\n").encode())


def replace_spec(folder: Path, content: bytes) -> None:
    """Write the file, whole or not at all."""
    partial = folder / f".{SPEC}.partial-{os.getpid()}"
    try:
        partial.write_bytes(content)
        partial.replace(folder / SPEC)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def kept(folder: Path | None) -> Iterator[None]:
    """Raise where a run's spec vanishes meanwhile: nobody could go on with that run."""
    there = folder is not None and (folder / SPEC).exists()
    yield
    if there and folder is not None and not (folder / SPEC).exists():
        raise vanished(folder)


def vanished(folder: Path) -> InputError:
    """Return what is said of a run whose spec has vanished."""
    return InputError(
        f"{folder / SPEC} has vanished since this launch wrote it. Each worker runs once more what stands above "
        "paceline.launch in the script, and if that clears the folder, the run is lost. Put such lines under "
        '`if __name__ == "__main__":`.'
    )


def read_spec(folder: Path) -> dict[str, Any]:
    """Return what a run was asked to do, each field of the type it must have; nothing where no launcher wrote it."""
    try:
        spec = documents.read_object(folder / SPEC)
        check_spec(spec)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(
            f"{folder / SPEC} cannot be read ({error.strerror}). Choose another --out."
        ) from error
    except documents.DocumentError as error:
        raise InputError(
            f"{folder / SPEC} is damaged ({error}). Remove it and give all options again."
        ) from error
    return spec


def check_spec(spec: Mapping[str, Any]) -> None:
    """Raise DocumentError where a field of a spec is not of the type it must have."""
    documents.check_fields(spec, TrainSpec)
    documents.check_fields(spec, _Started)
    documents.check_fields(spec.get("options", {}), RunOptions, where="options: ")
    for name, value in spec.get("overrides", {}).items():
        if name not in OVERRIDES:
            raise documents.DocumentError(f"overrides: {name} is nothing that a run can be told")
        documents.check_fields({name: value}, RunOptions, where="overrides: ")


@dataclass(frozen=True)
class _Started:
    """What a spec holds beside the training itself."""

    threads: int | None
    options: Mapping[str, Any]

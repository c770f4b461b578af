"""Reading one checkpoint: every byte is verified, and nothing but tensors and numbers is unpickled."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from paceline.checkpoint.durable import verify
from paceline.checkpoint.manifest import MODEL, OPTIMIZER, Manifest
from paceline.checkpoint.tensors import read_model
from paceline.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint in memory, its tensors on the CPU."""

    step: int
    position: dict[str, int]
    meta: dict[str, Any]
    state: dict[str, Any]
    """Everything that was given to `save`, position and meta included."""
    path: Path


def load(path: Path) -> Loaded:
    """Read the checkpoint in one folder."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}. Give the folder of one, such as step-100.")
    try:
        return read(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} cannot be used: {error}. Use an earlier checkpoint, or start without one."
        ) from error


def read(path: Path) -> Loaded:
    """Read the checkpoint in one folder; a CheckpointError holds the bare reason why that cannot be done."""
    manifest = Manifest.read(path)
    for name in (MODEL, OPTIMIZER):
        verify(path / name, manifest.files[name])
    try:
        model = read_model(path / MODEL, manifest.aliases)
    # torch opens the file, and says RuntimeError if it is gone by now.
    except (SafetensorError, LookupError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{MODEL} does not hold the state of a model") from error
    state = {
        "model": model,
        **_read_rest(path / OPTIMIZER),
        "position": manifest.position,
        "meta": manifest.meta,
    }
    return Loaded(step=manifest.step, position=manifest.position, meta=manifest.meta, state=state, path=path)


def seems_whole(path: Path) -> bool:
    """Tell whether the files of a checkpoint are there in full length, without reading what they hold."""
    try:
        files = Manifest.read(path).files
        return all((path / name).stat().st_size == record.size for name, record in files.items())
    except (CheckpointError, OSError):
        return False


def _read_rest(path: Path) -> dict[str, Any]:
    try:
        rest = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path.name} holds objects other than tensors and numbers, and was refused"
        ) from error
    except (RuntimeError, LookupError, ValueError, TypeError, AttributeError, EOFError, OSError) as error:
        raise CheckpointError(f"{path.name} is not a file that torch.save wrote") from error
    if not isinstance(rest, dict):
        raise CheckpointError(f"{path.name} does not hold the state of an optimizer")
    return rest

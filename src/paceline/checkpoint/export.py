"""The weights of a run as one safetensors file that anything can read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.durable import committing, remove, seal, sync
from paceline.checkpoint.leftovers import beside, sweep
from paceline.checkpoint.manifest import MANIFEST, MODEL
from paceline.checkpoint.read import Loaded, load
from paceline.checkpoint.store import Checkpoints
from paceline.checkpoint.tensors import write_model
from paceline.errors import CheckpointError, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was exported, from where."""

    path: Path
    source: Path
    step: int
    tensors: int
    size: int
    sha256: str
    skipped: tuple[tuple[Path, str], ...]
    """Newer checkpoints that were damaged, each with the reason."""


def export(run_or_checkpoint: Path, target: Path, *, overwrite: bool = False) -> ExportReport:
    """Write the model of a checkpoint, or of a run's newest whole checkpoint, as one safetensors file."""
    if target.suffix != ".safetensors":
        raise InputError(f"{target} does not end in .safetensors. Try {target.with_suffix('.safetensors')}.")
    if target.exists() and not overwrite:
        raise InputError(f"{target} exists already. Choose another name, or ask to overwrite it.")
    skipped: list[tuple[Path, str]] = []
    source = _find(run_or_checkpoint, skipped)
    # Copies of tied weights: every name is there for readers that know nothing of our manifest.
    tensors = {name: tensor.clone() for name, tensor in source.state["model"].items()}
    partial = beside(target, "partial")
    with committing(partial, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        partial.mkdir()
        sweep(target.parent, re.escape(target.name), now=partial.stat().st_mtime, writing=partial)
        write_model(partial / MODEL, tensors, {"format": "pt", "paceline_step": str(source.step)})
        record = seal(partial / MODEL)
        (partial / MODEL).replace(target)
        remove(partial)
        sync(target.parent)
    return ExportReport(
        path=target,
        source=source.path,
        step=source.step,
        tensors=len(tensors),
        size=record.size,
        sha256=record.sha256,
        skipped=tuple(skipped),
    )


def _find(place: Path, skipped: list[tuple[Path, str]]) -> Loaded:
    if (place / MANIFEST).exists() or place.name.startswith("step-"):
        return load(place)
    folder = place / "checkpoints" if (place / "checkpoints").is_dir() else place
    newest = Checkpoints(folder).newest(lambda path, reason: skipped.append((path, reason)))
    if newest is None:
        damaged = "".join(f" {path.name}: {reason}." for path, reason in skipped)
        raise CheckpointError(
            f"{place} holds no checkpoint that can be read.{damaged} "
            "Give the folder of a run that saved one, or of a checkpoint."
        )
    return newest

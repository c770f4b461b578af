"""The weights of a run as safetensors files that anything can read: one, or a set with its index.

A set is laid out as the Hugging Face loaders expect it: model-00001-of-00003.safetensors and so on, and
model.safetensors.index.json with the file of each tensor.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from paceline import documents, option_fields
from paceline.checkpoint.best import best_path
from paceline.checkpoint.durable import committing, remove, sync, sync_and_hash
from paceline.checkpoint.leftovers import beside, sweep
from paceline.checkpoint.manifest import MANIFEST, Manifest, newest_readable
from paceline.checkpoint.parts import StoredTensors
from paceline.checkpoint.read import unusable, verified
from paceline.checkpoint.safetensors_format import write_tensors
from paceline.checkpoint.stored import Stored
from paceline.errors import CheckpointError, InputError
from paceline.state.packing import bunches

SUFFIX = ".safetensors"
_LONGEST = 180
"""Bytes of a name that leave room for the number of a file of a set, and for the hidden name under which it is written."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was exported, from where."""

    path: Path
    """The file, or the index of the files."""
    source: Path
    step: int
    tensors: int
    size: int
    """Bytes of all files with tensors."""
    sha256: str
    """Of the file, or of the index."""
    files: tuple[str, ...]
    skipped: tuple[tuple[Path, str], ...]
    """Newer checkpoints that were damaged, each with the reason."""


def export(
    run_or_checkpoint: Path,
    target: Path,
    *,
    best: bool = False,
    average: bool | None = None,
    overwrite: bool = False,
    max_shard_size: str | None = None,
) -> ExportReport:
    """Write the model of a checkpoint, or of a run's newest whole (or `best`) one, as safetensors, with one file in memory.

    Of a run that averages its weights these are the averages where the run evaluates them, unless `average` says otherwise.
    """
    _check_name(target)
    most = None if max_shard_size is None else size_of(max_shard_size)
    source, manifest, skipped = find_weights(best_path(run_or_checkpoint) if best else run_or_checkpoint)
    model = manifest.model
    # Files are filled in the model's order; a tensor larger than a file has one to itself.
    shards = [*bunches(model, lambda name: model[name].bytes, math.inf if most is None else most)] or [[]]
    names = _names(target, len(shards))
    before = _there(target, names)
    if before and not overwrite:
        raise InputError(f"{before[0]} exists already. Choose another name, or ask to overwrite it.")
    for path in before:
        if path.is_dir():
            raise InputError(f"{path} is a folder, and an export writes files. Choose another name.")
    partial = beside(target, "partial")
    with committing(partial, target), StoredTensors(source, manifest) as parts:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        partial.mkdir()
        sweep(target.parent, re.escape(target.name), now=partial.stat().st_mtime, writing=partial)
        size = 0
        for name, shard in zip(names, shards, strict=True):
            size += _write(partial / name, shard, parts, manifest.step, average)
        if len(names) > 1:
            _write_index(partial / _index(target), names, shards, model)
        path = partial / (names[0] if len(names) == 1 else _index(target))
        record = sync_and_hash(path)
        _publish(partial, target, [*names, path.name], before)
    return ExportReport(
        path=target.with_name(path.name),
        source=source,
        step=manifest.step,
        tensors=len(model),
        size=size,
        sha256=record.sha256,
        files=tuple(names),
        skipped=tuple(skipped.items()),
    )


def _check_name(target: Path) -> None:
    path = option_fields.folder("the file to write", target)
    if path.suffix != SUFFIX:
        instead = path.with_suffix(SUFFIX) if path.name else path / f"model{SUFFIX}"
        raise InputError(f"{path} does not end in {SUFFIX}. Try {instead}.")
    if len(os.fsencode(path.name)) > _LONGEST:
        raise InputError(f"the name {path.name[:40]}... is longer than {_LONGEST} bytes. Give a shorter one.")


def size_of(text: str) -> int:
    """Return a size like 2GB in bytes."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([A-Za-z]*)", text.strip())
    size = 0.0 if found is None else float(found[1]) * _UNITS.get(found[2].upper(), 0)
    if size < 1:
        raise InputError(f"--max-shard-size {text!r} is not a size. Give one like 2GB, 500MB or 1GiB.")
    return int(size)


def _names(target: Path, count: int) -> list[str]:
    if count == 1:
        return [target.name]
    return [f"{target.stem}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def _index(target: Path) -> str:
    return f"{target.name}.index.json"


def _there(target: Path, names: list[str]) -> list[Path]:
    """Return what is there of this export, and what the index in place lists of an earlier one; other files are no concern."""
    index = target.with_name(_index(target))
    mine = [target, index, *(target.with_name(name) for name in (*names, *_listed(index)))]
    return [path for path in dict.fromkeys(mine) if path.exists() or path.is_symlink()]


def _listed(index: Path) -> list[str]:
    """Return the files that an index lists as its own."""
    try:
        listed = documents.read_object(index).get("weight_map")
    except (OSError, documents.DocumentError):
        return []
    stem = index.name.removesuffix(f"{SUFFIX}.index.json")
    pattern = re.compile(rf"{re.escape(stem)}-[0-9]{{5}}-of-[0-9]{{5}}{re.escape(SUFFIX)}")
    named = listed.values() if isinstance(listed, dict) else ()
    return sorted({name for name in named if isinstance(name, str) and pattern.fullmatch(name)})


def _write(path: Path, names: Iterable[str], parts: StoredTensors, step: int, average: bool | None) -> int:
    # Copies of tied weights: every name is there for readers that know nothing of our manifest.
    try:
        weights = parts.weights(average)
        tensors: dict[str, Tensor] = {name: weights[name] for name in names}
    except CheckpointError as error:
        raise unusable(parts.folder, error) from error
    write_tensors(path, tensors, {"format": "pt", "paceline_step": str(step)})
    sync(path)
    return path.stat().st_size


def _write_index(path: Path, names: list[str], shards: list[list[str]], model: dict[str, Stored]) -> None:
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(tensor.bytes for tensor in model.values())
    path.write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
        + "\n",
        encoding="utf-8",
    )


def _publish(partial: Path, target: Path, names: list[str], before: list[Path]) -> None:
    """Rename the files, what is read first last; then take away what an earlier export left."""
    for name in dict.fromkeys(names):
        (partial / name).replace(target.with_name(name))
    for path in before:
        if path.name not in names:
            path.unlink(missing_ok=True)
    remove(partial)
    sync(target.parent)


def find_weights(place: Path) -> tuple[Path, Manifest, dict[Path, str]]:
    """Return a checkpoint whose files are all undamaged, and newer ones of its run that are not."""
    if (place / MANIFEST).exists() or place.name.startswith("step-"):
        if not place.is_dir():
            raise CheckpointError(
                f"there is no checkpoint at {place}. Give the folder of one, such as step-100."
            )
        try:
            return place, verified(place), {}
        except CheckpointError as error:
            raise unusable(place, error) from error
    return newest_readable(place, verified)

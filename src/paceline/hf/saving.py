"""The weights of a run as a folder that `from_pretrained` loads: configuration, tokenizer and the names of transformers.

The model's own `save_pretrained` writes it, so that tied weights, renamed keys, generation settings and adapters of peft's
are as its library wants them; of the run come the values alone, whatever strategy had them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.checkpoint.best import best_path
from paceline.checkpoint.durable import committing, remove
from paceline.checkpoint.exporting import find_weights, size_of
from paceline.checkpoint.leftovers import beside, sweep
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.parts import StoredTensors
from paceline.checkpoint.read import unusable
from paceline.errors import CheckpointError, InputError
from paceline.hf.library import transformers
from paceline.training.folder import SPEC, read_spec
from paceline.training.reference import load_task


def save_pretrained(
    run_or_checkpoint: str | Path,
    out: str | Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    best: bool = False,
    average: bool | None = None,
    tokenizer: Any = None,
    merge: bool = False,
    max_shard_size: str = "5GB",
) -> Path:
    """Write the model of a checkpoint, or of a run's newest whole (or `best`) one, as a folder for `from_pretrained`.

    `model` is that of the run (or makes it) where the run has no Task; `tokenizer` has `save_pretrained` too, or is a folder with
    one. Averages of the weights are written where the run evaluates them, unless `average` says otherwise. Of a model with
    adapters of peft's the adapters alone are written, unless they are to be merged (`merge`).
    """
    made = write_pretrained(
        Path(run_or_checkpoint),
        Path(out),
        model=model,
        best=best,
        average=average,
        tokenizer=tokenizer,
        merge=merge,
        max_shard_size=max_shard_size,
    )
    for path, reason in made.skipped.items():
        warnings.warn(f"passed over {path}: {reason}", stacklevel=2)
    return made.path


class Pretrained(NamedTuple):
    """A folder that was written: of which step, and the newer checkpoints that are damaged."""

    path: Path
    step: int
    skipped: dict[Path, str]


def write_pretrained(
    place: Path,
    target: Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    best: bool,
    average: bool | None,
    tokenizer: Any,
    merge: bool,
    max_shard_size: str,
) -> Pretrained:
    """Do what `save_pretrained` does, and say what was written."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} is there already and not empty. Choose another folder.")
    source, manifest, skipped = find_weights(best_path(place) if best else place)
    made = _model(source, model)
    _fill(made, source, manifest, average)
    if merge:
        made = _merged(made)
    words = _tokenizer(tokenizer)
    partial = beside(target, "partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    with committing(partial, target):
        remove(partial)
        partial.mkdir()
        sweep(target.parent, re.escape(target.name), now=partial.stat().st_mtime, writing=partial)
        _write(made, partial, size_of(max_shard_size))
        if words is not None:
            words.save_pretrained(partial)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    return Pretrained(target, manifest.step, skipped)


def _model(source: Path, given: nn.Module | Callable[[], nn.Module] | None) -> nn.Module:
    """Return a model of the run's kind: the one given, or the task's, whatever its values."""
    if isinstance(given, nn.Module):
        return given
    make = given
    if make is None:
        folder = source.parent.parent
        spec = read_spec(folder)
        if not spec.get("task"):
            raise InputError(
                f"{folder / SPEC} names no task, which would make the model. Give paceline.hf.save_pretrained(..., model=...)."
            )
        make = load_task(spec["task"], spec.get("settings", {})).model
    return make()


def _fill(model: nn.Module, source: Path, manifest: Manifest, average: bool | None) -> None:
    with StoredTensors(source, manifest) as parts, torch.no_grad():
        state = model.state_dict(keep_vars=True)
        weights = parts.weights(average)
        wrong = sorted(state.keys() ^ set(weights))
        if wrong:
            where = "the model" if wrong[0] not in state else str(source)
            raise InputError(f"{where} has no {wrong[0]}. Give the model that the run has trained.")
        for name, tensor in state.items():
            try:
                values = weights[name]
            except CheckpointError as error:
                raise unusable(source, error) from error
            if values.shape != tensor.shape:
                raise InputError(
                    f"{name} has the shape {tuple(values.shape)} in {source} and {tuple(tensor.shape)} in the model. Give "
                    "the model that the run has trained."
                )
            tensor.copy_(values)


def _merged(model: nn.Module) -> nn.Module:
    merge = getattr(model, "merge_and_unload", None)
    if merge is None:
        raise InputError(
            f"a {type(model).__name__} has no adapters of peft's to merge. Leave out merge (--merge)."
        )
    merged: nn.Module = merge()
    return merged


def _tokenizer(given: Any) -> Any:
    """Return what saves itself: a folder's tokenizer is loaded first."""
    if not isinstance(given, str | Path):
        return given
    try:
        return transformers().AutoTokenizer.from_pretrained(given, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{given} holds no tokenizer ({str(error).splitlines()[0]}). Give a folder with one."
        ) from error


def _write(model: nn.Module, folder: Path, max_shard_size: int) -> None:
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        raise InputError(
            f"the model of this run is a {type(model).__name__}, which has no save_pretrained: it is none of transformers'. "
            "Use paceline export without --hf."
        )
    if hasattr(model, "peft_config"):
        save(str(folder))
    else:
        save(str(folder), max_shard_size=max_shard_size)

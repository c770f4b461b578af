"""Weights from a folder or file of safetensors into a model that is being made, none of them held twice.

The values are read from the mapped files tensor by tensor as they are copied. Where a strategy records the construction of a
model (fsdp, pp), the copies are recorded with it and carried out one tensor at a time: so no worker ever holds all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paceline import documents
from paceline.compat.dispatch import no_modes
from paceline.errors import InputError
from paceline.hf.library import transformers

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def from_folder(
    folder: str | Path,
    *,
    auto: Any = None,
    fresh: Iterable[str] = (),
    unused: Iterable[str] = (),
    **config: Any,
) -> nn.Module:
    """Make the model of a folder with config.json and its weights in safetensors; call it in `Task.model`.

    `auto` is the class that makes it (a class of transformers' with `from_config` or taking a configuration); without it that
    of the folder. Patterns of parameters that are `fresh` (not in the files) and of weights that are `unused` must be said.
    """
    folder, library = Path(folder), transformers()
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} holds no config.json, so it is no folder of a model. Give one that save_pretrained wrote."
        )
    made = library.AutoConfig.from_pretrained(folder, local_files_only=True, **config)
    kind = auto or _class_of(made, folder, library)
    model: nn.Module = kind.from_config(made) if hasattr(kind, "from_config") else kind(made)
    load_weights(model, folder, fresh=fresh, unused=unused)
    return model


def _class_of(config: Any, folder: Path, library: Any) -> Any:
    names = config.architectures or []
    kind = getattr(library, names[0], None) if names else None
    if kind is None:
        raise InputError(
            f"{folder / 'config.json'} names {names[0] if names else 'no class'}, which is no class of transformers'. Say which "
            "makes the model: from_folder(..., auto=transformers.AutoModelForCausalLM)."
        )
    return kind


def load_weights(
    model: nn.Module, place: str | Path, *, fresh: Iterable[str] = (), unused: Iterable[str] = ()
) -> None:
    """Copy the weights of a folder or file into a model, all of them, or raise with what is missing or left over.

    A weight that the model has under several names (tied) may have any of them in the files.
    """
    place = Path(place)
    with no_modes():
        stored = _stored(place)
    state = model.state_dict(keep_vars=True)
    names = _matching(model, state, stored)
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    missing: list[str] = []
    used: set[str] = set()
    for same in groups.values():
        found = next((names[name] for name in same if names.get(name) in stored), None)
        used.update(names[name] for name in same if name in names)
        if found is not None:
            _copy(same[0], state[same[0]], stored[found])
        elif not any(fnmatchcase(name, pattern) for name in same for pattern in fresh):
            missing.append(same[0])
    left = [name for name in stored if name not in used and not any(fnmatchcase(name, one) for one in unused)]
    _check(place, type(model).__name__, missing, left)


def _check(place: Path, kind: str, missing: list[str], left: list[str]) -> None:
    told = [
        f"{text} {_few(names)} ({option}=[{names[0]!r}, ...] {effect})"
        for text, names, option, effect in (
            ("has no", missing, "fresh", "leaves them as they are made"),
            (f"holds what a {kind} has no place for:", left, "unused", "leaves them out"),
        )
        if names
    ]
    if told:
        raise InputError(
            f"{place} {' and '.join(told)}. Say so if that is meant, or use the class that wrote it."
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def _copy(name: str, target: Tensor, stored: Stored) -> None:
    if tuple(target.shape) != stored.shape:
        raise InputError(
            f"{name} has the shape {tuple(target.shape)} in the model and {stored.shape} in {stored.file}. Use the configuration "
            "that the weights were made with."
        )
    with no_modes():
        values = stored.read()
    # A Parameter that requires gradients is written to as its values are: in the constructor nothing follows it yet.
    with torch.no_grad():
        target.copy_(values)


def _matching(model: nn.Module, state: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, str]:
    """Return for each name of the model its name in the files: of a base model alone they lack the name it has in this one."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if prefix == "." or any(name in stored for name in state if name.startswith(prefix)):
        return {name: name for name in state}
    if any(name.removeprefix(prefix) in stored for name in state if name.startswith(prefix)):
        return {name: name.removeprefix(prefix) for name in state}
    return {name: prefix + name if prefix + name in stored else name for name in state}


# The files.


@dataclass(frozen=True)
class Stored:
    """A tensor in a mapped file."""

    file: Path
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Returns it; its pages are read when they are looked at, and belong to the file."""


def _stored(place: Path) -> dict[str, Stored]:
    """Return what a file, or the files of a folder, hold by name."""
    found: dict[str, Stored] = {}
    for file in _files(place):
        found |= _of(file)
    return found


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    if (place / INDEX).is_file():
        try:
            listed = documents.read_object(place / INDEX)["weight_map"]
            names = sorted({str(name) for name in listed.values()})
        except (documents.DocumentError, KeyError, AttributeError) as error:
            raise InputError(f"{place / INDEX} is damaged ({error}). Copy the folder anew.") from error
        missing = [name for name in names if not (place / name).is_file()]
        if missing:
            raise InputError(f"{place} lacks {_few(missing)}, which {INDEX} names. Copy the folder anew.")
        return [place / name for name in names]
    if (place / SINGLE).is_file():
        return [place / SINGLE]
    raise InputError(
        f"{place} holds no {SINGLE} nor {INDEX}. Give a folder with weights in safetensors, or one such file."
    )


def _of(file: Path) -> dict[str, Stored]:
    try:
        opened: Any = safe_open(file, "pt")
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is no whole safetensors file ({error}). Copy it anew.") from error
    return {name: Stored(file, shape, partial(opened.get_tensor, name)) for name, shape in shapes.items()}

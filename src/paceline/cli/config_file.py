"""Reads a file of options: TOML, YAML, or the `spec.json` of a run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline import documents
from paceline.errors import InputError, UnknownNameError
from paceline.option_fields import Options, known_options
from paceline.strategies.tuning import Tuning
from paceline.tasks import TASKS
from paceline.training import folder
from paceline.training.options import RunOptions
from paceline.training.spec import OVERRIDES, TrainSpec

MOST = 2**20
"""Bytes of a file of options."""
KINDS: tuple[type[Options], ...] = (RunOptions, Tuning, TrainSpec)
TASK, SETTINGS, THREADS = "task", "settings", "threads"
BESIDE = (TASK, SETTINGS, THREADS)
"""What a file may say beside the options of these classes."""
_TABLES = ("options", "tuning", "overrides")
"""Tables that a spec.json has; their contents count as if they stood outside."""


def read_config(path: Path | None) -> dict[str, Any]:
    """Return what a file says, by the names that Python's keywords have; nothing where there is no file."""
    if path is None:
        return {}
    found = _parse(path)
    try:
        said = _of_run(found) if path.suffix == ".json" and "options" in found else _flat(found)
    except documents.DocumentError as error:
        raise InputError(f"--config {path}: {error}.") from None
    known = [*known_options(*KINDS), *OVERRIDES, *BESIDE]
    for name in said:
        if name not in known:
            raise _in(path, UnknownNameError("option", name, known))
    said = {name: value for name, value in said.items() if value is not None}
    for kind in KINDS:
        try:
            said |= kind.read({name: value for name, value in said.items() if name in known_options(kind)})
        except InputError as error:
            raise _in(path, error) from None
    settings = said.get(SETTINGS, {})
    if not isinstance(settings, Mapping):
        raise InputError(
            f"--config {path}: settings is {settings!r}, but must be a table of the task's arguments."
        )
    if settings:
        said[SETTINGS] = {str(key): _text(value) for key, value in settings.items()}
    if not isinstance(said.get(TASK, ""), str):
        raise InputError(f"--config {path}: task is {said[TASK]!r}, but must be text.")
    return said


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = documents.read_bytes(path, MOST).decode()
        found = _READERS[path.suffix](text)
    except KeyError:
        raise InputError(
            f"--config {path}: a file of options is TOML, YAML or a run's spec.json. Give one that ends in .toml, .yaml or .json."
        ) from None
    except OSError as error:
        raise InputError(f"--config {path} cannot be read: {error.strerror}.") from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # documents.DocumentError among them
        raise InputError(f"--config {path}: {' '.join(str(error).split())}.") from None
    if not isinstance(found, dict):
        raise InputError(f"--config {path} holds no names with values, such as workers = 2.")
    return found


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise InputError(
            "a YAML file is read with PyYAML, which is not installed. Install paceline[yaml], or write TOML."
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


_READERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": json.loads,
}


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return names as Python has them; a table of options counts as its contents."""
    said: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        more = _flat(value) if name in _TABLES and isinstance(value, Mapping) else {name: value}
        twice = next((one for one in more if one in said), None)
        if twice is not None:
            raise documents.DocumentError(f"{twice} stands there twice")
        said |= more
    return said


def _of_run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's spec.json asked for: where it says what nobody has to say, nobody did."""
    folder.check_spec(spec)
    options = spec["options"]
    tuning, overrides = options.get("tuning", {}), spec.get("overrides", {})
    of_run = {"out", "resume", "tuning", "shards_from", *OVERRIDES}
    run = {name: value for name, value in options.items() if name not in of_run}
    told = {name: value for name, value in spec.items() if name not in ("name", "options", "overrides")}
    said, usual = {**run, **tuning, **told}, known_options(*KINDS)
    if TASKS.get(spec.get("name", ""), ("",))[0] == spec.get(TASK):
        said[TASK] = spec["name"]  # a built-in one is known by its short name
    if options.get("shards_from") == "workers":
        said.pop("shards", None)
    asked = {name: value for name, value in said.items() if name not in usual or value != usual[name]}
    return {**asked, **overrides}  # these against the task's own, whatever they are


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _in(path: Path, error: InputError) -> InputError:
    return InputError(f"--config {path}: {error}")

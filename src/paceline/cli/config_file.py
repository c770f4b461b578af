"""Reads a file of options: TOML, YAML, or the `spec.json` of a run."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from paceline import documents
from paceline.errors import InputError, UnknownNameError
from paceline.option_fields import Options, known_options
from paceline.strategies.tuning import Tuning
from paceline.tasks.names import task_of
from paceline.training import folder
from paceline.training.options import RunOptions
from paceline.training.spec import OVERRIDES, TrainSpec

MOST = 2**20
"""Bytes of a file of options."""
KINDS: tuple[type[Options], ...] = (RunOptions, Tuning, TrainSpec)
TASK, SETTINGS, THREADS = "task", "settings", "threads"
BESIDE = (TASK, SETTINGS, THREADS)
"""What a file may say beside the options of these classes."""
_FLOATS = {
    name for kind in KINDS for name, hint in get_type_hints(kind).items() if float in (hint, *get_args(hint))
}
_EXPONENT = r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+"
_USUAL = {one.name: one.default for one in fields(RunOptions) if one.name in OVERRIDES}
"""What a run has that was told nothing against its task."""
_TABLES = ("options", "tuning", "overrides")
"""Tables that a spec.json has; their contents count as if they stood outside."""


def read_config(path: Path | None) -> dict[str, Any]:
    """Return what a file says, by the names that Python's keywords have; nothing where there is no file."""
    if path is None:
        return {}
    kind_of_file, found = path.suffix.lower(), _parse(path)
    try:
        said = _of_run(found) if kind_of_file == ".json" and "options" in found else _flat(found)
    except documents.DocumentError as error:
        raise InputError(f"--config {path}: {error}.") from None
    known = dict.fromkeys([*known_options(*KINDS), *OVERRIDES, *BESIDE])
    for name in said:
        if name not in known:
            raise _in(path, UnknownNameError("option", name, known))
    said = {name: value for name, value in said.items() if value is not None}
    if _READERS[kind_of_file] is _yaml:
        said = {name: _number(name, value) for name, value in said.items()}
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
        said[SETTINGS] = {str(key): _text(path, str(key), value) for key, value in settings.items()}
    if not isinstance(said.get(TASK, ""), str):
        raise InputError(f"--config {path}: task is {said[TASK]!r}, but must be text.")
    return said


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = documents.read_bytes(path, MOST).decode("utf-8-sig")  # an editor may put a mark in front
        found = _READERS[path.suffix.lower()](text)
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

    class Once(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """Refuses a name that stands twice in one mapping; YAML forbids it, and PyYAML takes the last."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            _once(name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode))
            return node

    try:
        return yaml.load(text, Once)  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _json(text: str) -> Any:
    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _once(name for name, _ in pairs)
        return dict(pairs)

    return json.loads(text, object_pairs_hook=mapping)


def _once(names: Iterable[str]) -> None:
    """Raise DocumentError where a name stands twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise documents.DocumentError(f"{name} stands there twice")
        seen.add(name)


_READERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": _json,
}


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return names as Python has them; a table of options counts as its contents."""
    pairs: list[tuple[str, Any]] = []
    for key, value in found.items():
        name = str(key).replace("-", "_")
        pairs += _flat(value).items() if name in _TABLES and isinstance(value, Mapping) else [(name, value)]
    _once(name for name, _ in pairs)
    return dict(pairs)


def _of_run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's spec.json asked for: where it says what nobody has to say, nobody did."""
    folder.check_spec(spec)
    options = spec["options"]
    tuning, overrides = options.get("tuning", {}), spec.get("overrides", {})
    of_run = {"out", "resume", "tuning", "shards_from"}
    run = {name: value for name, value in options.items() if name not in of_run}
    told = {name: value for name, value in spec.items() if name not in ("name", "options", "overrides")}
    _once([*run, *tuning, *told])
    said, usual = {**run, **tuning, **told}, {**known_options(*KINDS), **_USUAL}
    if TASK in spec:
        said[TASK] = task_of(spec)
    if options.get("shards_from") == "workers":
        said.pop("shards", None)
    asked = {name: value for name, value in said.items() if name not in usual or value != usual[name]}
    differs = next((name for name in overrides if asked.get(name, overrides[name]) != overrides[name]), None)
    if differs is not None:
        raise documents.DocumentError(
            f"{differs} is {asked[differs]!r} in options and {overrides[differs]!r} in overrides"
        )
    return {**asked, **overrides}  # these against the task's own, whatever they are


def _text(path: Path, name: str, value: Any) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # a date; a table that holds itself
        raise InputError(
            f"--config {path}: settings: {name} is {documents.shown(value)}, but must be text, a number, true or false, "
            "or a list or table of these."
        ) from None


def _number(name: str, value: Any) -> Any:
    """Return a number that PyYAML takes for text, 1e-3 without a point, as the command line reads it."""
    number = name in _FLOATS and isinstance(value, str) and re.fullmatch(_EXPONENT, value)
    return float(value) if number else value


def _in(path: Path, error: InputError) -> InputError:
    return InputError(f"--config {path}: {error}")

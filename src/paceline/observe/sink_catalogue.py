"""Where metrics may go beside events.jsonl: the sinks by name, and a user's own as `module:Class`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.errors import InputError, UnknownNameError
from paceline.observe.sinks import Sink


@dataclass(frozen=True)
class SinkEntry:
    """One kind of sink."""

    reference: str
    """The class, as `module:Class`; it is made with the run folder, or None."""
    package: str = ""
    """What it needs that is optional; the extra of that name brings it."""
    needs_folder: bool = False


SINKS = {
    "csv": SinkEntry("paceline.observe.csv_file:CsvSink", needs_folder=True),
    "tensorboard": SinkEntry(
        "paceline.observe.tensorboard:TensorBoardSink", package="tensorboard", needs_folder=True
    ),
    "wandb": SinkEntry("paceline.observe.weights_and_biases:WandbSink", package="wandb"),
    "mlflow": SinkEntry("paceline.observe.mlflow_runs:MlflowSink", package="mlflow"),
}
IDENTITIES = "sinks"
"""The folder, in the run folder, in which a sink notes which run of its own this is."""


def written(given: str | type | Sequence[str | type] | None) -> str | None:
    """Return sinks as one text, however they are given: names, `module:Class`, or classes of a module."""
    if given is None:
        return None
    several = given if isinstance(given, list | tuple) else [given]
    names = [part.strip() for one in several for part in _name(one).split(",")]
    for name in names:
        entry_of(name)
    return ",".join(dict.fromkeys(names))


def named(text: str | None) -> Sequence[str]:
    """Return the names in such a text."""
    return text.split(",") if text else ()


def check(names: Iterable[str], folder: Path | None) -> None:
    """Raise InputError where a sink cannot be opened, as far as that can be known without opening it."""
    for name in names:
        entry = entry_of(name)
        if entry.needs_folder and folder is None:
            raise InputError(f"--sink {name} needs a folder to write into. Give --out.")
        if entry.package and importlib.util.find_spec(entry.package) is None:
            raise InputError(
                f'--sink {name} needs the package {entry.package}, which is not installed. Run: pip install "paceline[{name}]"'
            )
        module = entry.reference.partition(".")[0].partition(":")[0]
        if PathFinder.find_spec(module, [*sys.path, str(Path.cwd())]) is None:
            raise InputError(
                f"--sink {name}: there is no module {module}, neither installed nor in the folder you are in. Give module:Class."
            )


def opened(name: str, folder: Path | None) -> Sink:
    """Open a sink."""
    module, _, attribute = entry_of(name).reference.partition(":")
    sink: Sink = getattr(importlib.import_module(module), attribute)(folder)
    return sink


def entry_of(name: str) -> SinkEntry:
    """Return what is known of a sink."""
    if name in SINKS:
        return SINKS[name]
    module, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise UnknownNameError("--sink", name, (*SINKS, "module:Class"))
    return SinkEntry(name)


def continued(folder: Path, name: str, identity: str | None = None) -> str | None:
    """Return, or note, by which name of its own a sink knows this run: it is gone on with, by another process too."""
    place = folder / IDENTITIES / name
    if identity is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(identity, encoding="utf-8")
    return place.read_text(encoding="utf-8").strip() or None if place.exists() else None


def _name(given: object) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, type) and given.__module__ != "__main__" and "<" not in given.__qualname__:
        return f"{given.__module__}:{given.__qualname__}"
    raise InputError(
        f"sink={given!r:.60}: a sink is opened in a process of its own, so give its class, from a module that can be imported, "
        'or "module:Class".'
    )

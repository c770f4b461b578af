"""Options that several commands share and that belong to no class of options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import option_fields
from paceline.errors import InputError
from paceline.training.folder import new_folder as new_folder  # noqa: PLC0414  (for the commands)


def folder_option(words: str) -> Any:
    """Return the option --out: a folder that a file system can have."""
    return typer.Option(
        "--out", parser=lambda text: option_fields.folder("--out", text), metavar="PATH", help=words
    )


TASK = "A built-in task (see `paceline tasks`), path.py:Class or package.module:Class."
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="An argument of the task's constructor; may be repeated."
    ),
]
Threads = Annotated[int | None, typer.Option(help="Threads of each worker. Default: cores / shards.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, the last line of standard output.")
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A file of options: TOML, YAML, or the spec.json of a run. The command line overrides it.",
    ),
]


def settings(texts: list[str] | None) -> dict[str, str]:
    """Read what --set was given."""
    return dict(_setting(text) for text in texts or [])


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {text!r} is not KEY=VALUE, such as --set lr=0.001.")
    return key.strip(), value.strip()

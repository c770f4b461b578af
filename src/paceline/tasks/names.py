"""Turns what the user typed for TASK into a reference that a worker can import, without importing it here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import InputError, UnknownNameError
from paceline.tasks import GAMES, TASKS


def resolve(text: str) -> tuple[str, str]:
    """Return the reference and the name to show: a built-in name, `path.py:Class` or `package.module:Class`."""
    if text in TASKS:
        return TASKS[text][0], text
    if text in GAMES:
        raise InputError(
            f"{text} is learned from episodes, not from data with a loss. Start it with: paceline rollouts {text}"
        )
    place, _, kind = text.partition(":")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise InputError(f"there is no file {place}. Give the path of a Python file: path.py:Class.")
        return f"{path.resolve()}:{kind}" if kind else str(path.resolve()), kind or path.stem
    if kind and place:
        return text, kind
    raise UnknownNameError("task", text, TASKS)


def task_of(spec: Mapping[str, Any]) -> str | None:
    """Return the task of a run by what a user would type, from its spec.json; None where it has none, as a loop of one's own."""
    reference: str | None = spec.get("task") or None
    short = spec.get("name", "")
    return short if short in TASKS and TASKS[short][0] == reference else reference

"""`paceline new`: a small project that trains, is tested, and has a config file."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import InputError

FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "task.py": "task.py.txt",
    "config.toml": "config.toml.txt",
    "tests/test_task.py": "test_task.py.txt",
    "README.md": "README.md.txt",
    ".gitignore": "gitignore.txt",
}
"""What is made, each from a file in `cli/project`."""


def new(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where; its name is the project's.")],
) -> None:
    """Make a small project: a task, a config file, tests that train it on one worker and on two."""
    name = _name(folder)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder} is there already and not empty. Give a folder that is new.")
        for place, source in FILES.items():
            text = resources.files("paceline.cli").joinpath("project", source).read_text(encoding="utf-8")
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace("{name}", name), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}. Give another folder.") from None
    print(f"made {folder}. Next:\n  cd {folder}\n  paceline train --config config.toml\n  python -m pytest")  # noqa: T201


def _name(folder: Path) -> str:
    name = folder.name or folder.resolve().name
    if re.fullmatch(r"[A-Za-z]([A-Za-z0-9_.-]{0,62}[A-Za-z0-9])?", name) is None:
        raise InputError(
            f"{name!r} is no name of a Python project. Use letters, digits, - and _, with a letter first and no sign at the end."
        )
    return name

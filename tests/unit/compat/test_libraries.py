"""Which folders are libraries': Python's own, and those of installed packages wherever they lie."""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from paceline.compat.libraries import is_library
from paceline.strategies.guards import reached
from paceline.training import task_folder


@pytest.mark.parametrize("module", [json, pytest, torch])
def test_pythons_own_and_what_is_installed_here(module: object) -> None:
    assert is_library(str(Path(str(module.__file__)).parent))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "folder",
    [
        "/home/me/.local/lib/python3.12/site-packages",
        "/usr/lib/python3/dist-packages/numpy/core",
        "/home/me/project/.venv/lib/python3.12/site-packages",
        sysconfig.get_path("stdlib"),
    ],
)
def test_folders_of_libraries(folder: str) -> None:
    assert is_library(folder)


@pytest.mark.parametrize(
    "folder", ["/home/me/my-packages", "/home/me/packages", f"{sysconfig.get_path('stdlib')}-mine"]
)
def test_folders_of_the_users(folder: str) -> None:
    assert not is_library(folder)


@pytest.mark.parametrize(("folder", "users"), [("site-packages", False), ("mine", True)])
def test_every_guard_goes_by_it(
    folder: str, users: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / folder / "queue.py"  # its name is one of Python's own
    path.parent.mkdir()
    path.write_text("")
    name = f"queue_of_{folder}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    assert task_folder.is_own(module) is users
    assert task_folder.is_users(name) is users
    assert reached.is_users(name) is users

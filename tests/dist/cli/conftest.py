"""The command line, called within this process so that its fork server stays warm from test to test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from paceline.cli import main


@dataclass(frozen=True)
class Ended:
    """What a command left on the terminal."""

    status: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., Ended]:
    """Call `paceline ARGUMENTS` as its entry point does."""

    def call(*arguments: object) -> Ended:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main.run()
        return Ended(caught.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path

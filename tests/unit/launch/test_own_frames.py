"""An InputError that nobody catches is shown without our own frames."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import paceline
from paceline.errors import InputError


def ask(**options: Any) -> None:
    paceline.launch(print, **options)


def test_a_script_sees_its_own_lines_and_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(2):  # hidden once
        with pytest.raises(InputError) as caught:
            ask(workers=0)
        assert sys.excepthook is not sys.__excepthook__
    assert len(caught.traceback) > 3  # for whoever does look
    sys.excepthook(caught.type, caught.value, caught.tb)
    shown = capsys.readouterr().err.splitlines()
    files = {line.split('"')[1] for line in shown if line.lstrip().startswith("File ")}
    assert files == {__file__}
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[-1] == "paceline.errors.InputError: workers is 0, but must be at least 1."


def test_other_errors_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(InputError):
        ask(workers=0)
    with pytest.raises(TypeError) as caught:
        paceline.launch()  # type: ignore[call-arg]
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert "lazy.py" in capsys.readouterr().err

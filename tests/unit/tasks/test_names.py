"""What may be typed for TASK."""

import pytest

from paceline.errors import InputError, UnknownNameError
from paceline.tasks.names import resolve


def test_a_built_in_name():
    assert resolve("digits") == ("paceline.tasks.digits:Digits", "digits")


def test_a_file_with_and_without_a_class(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    assert resolve("mine.py:Mine") == (f"{tmp_path / 'mine.py'}:Mine", "Mine")
    assert resolve("mine.py") == (str(tmp_path / "mine.py"), "mine")


def test_a_module():
    assert resolve("package.module:Mine") == ("package.module:Mine", "Mine")


def test_what_is_not_there():
    with pytest.raises(InputError, match=r"there is no file nowhere\.py"):
        resolve("nowhere.py:Mine")
    for text in ("dense4097", "digits:", ":Mine"):
        with pytest.raises(UnknownNameError, match="unknown task"):
            resolve(text)

"""Which values a file's source fixes."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.training.source_trees import written_by
from paceline.training.source_values import is_fixed
from paceline.training.source_writes import ANY

SOURCE = """
import os, time
LR = 0.1
BOTH: dict = {"lr": LR, "steps": [n * 2 for n in range(3)]}
for one in (1, 2):
    LAST = one
BOTH["more"] = LAST + len("abc")
BEGUN = time.time()
LATER = BEGUN + 1
WORDS = "a b".split()
RANK = int(os.environ.get("RANK", 0))
if RANK:
    MODE = 1
else:
    MODE = 2
try:
    import fast
    FAST = True
except ImportError:
    FAST = False
IS_MAIN = __name__ == "__main__"
NAMES = []
FILLED = {"a": 1}
def register(name): NAMES.append(name)
register("a")
read_into(FILLED)
def count():
    global CALLS
    CALLS += 1
CALLS = 0
class Task:
    lr = LR
    begun = time.time()
    seen = 0
    def step(self):
        self.lr = 3
        type(self).seen += 1
if __name__ == "__main__":
    LR = time.time()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.mark.parametrize(
    ("owner", "name", "here", "fixed"),
    [
        ("", "LR", 0.1, True),
        ("", "BOTH", {}, True),
        ("", "LAST", 2, True),
        ("", "WORDS", ["a", "b"], True),
        ("", "BEGUN", 1.0, False),
        ("", "LATER", 2.0, False),
        ("", "RANK", 1, False),
        ("", "MODE", 1, False),
        ("", "FAST", True, False),
        ("", "IS_MAIN", False, False),
        ("", "NAMES", ["a"], False),  # a function has written it at the import
        ("", "NAMES", [], True),
        ("", "FILLED", {"a": 2}, False),
        ("", "FILLED", {"a": 1}, True),
        ("", "nowhere", 1, False),
        ("Task", "lr", 0.1, True),
        ("Task", "begun", 1.0, False),
        ("Task", "put_there", 1.0, True),
        ("Nobody", "lr", 1.0, False),
    ],
)
def test_what_is_fixed(file: str, owner: str, name: str, here: object, fixed: bool) -> None:
    mutable = isinstance(here, list | dict)
    assert is_fixed(file, owner, name, mutable=mutable, is_here=lambda value: value == here) is fixed


def test_without_a_source_nothing_is(tmp_path: Path) -> None:
    assert not is_fixed(None, "", "LR", mutable=False, is_here=bool)
    assert not is_fixed(str(tmp_path / "none.py"), "", "LR", mutable=False, is_here=bool)


def test_what_the_code_that_runs_writes(file: str) -> None:
    lines = {
        word: 1 + SOURCE[: SOURCE.index(word)].count("\n")
        for word in ("def register", "def count", "def step")
    }
    reached = {word: frozenset({("source", line)}) for word, line in lines.items()}

    def keys(word: str, name: str, owner: str = "") -> list[object]:
        found = [one.key_of(owner, name) for one in written_by(reached[word], {"source": file}.get)]
        return [one for one in found if one is not None]

    assert keys("def register", "NAMES") == [ANY]
    assert keys("def count", "CALLS") == [ANY]
    assert keys("def step", "seen", "Task") == [ANY]
    assert not keys("def step", "lr", "Task"), "that is the object's own"
    assert not keys("def step", "lr", "Other"), "nor is it another's"
    assert not keys("def register", "CALLS")

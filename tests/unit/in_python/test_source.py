"""What may be given for a task, and how it comes to the workers."""

import sys
import threading

import pytest

import paceline
from paceline.errors import InputError
from paceline.in_python.source import source_of, texts_of
from paceline.training import script
from paceline.training.reference import make_task
from paceline.training.spec import TrainSpec
from tests.dist.launch.lines import Lines


def made(task, **settings):
    """Make a task as a worker does."""
    found = source_of(task)
    texts = texts_of(settings or None, task)
    return make_task(TrainSpec(task=found.reference, name=found.name, settings=texts, shipped=found.shipped))


def test_text_and_classes_of_modules_go_by_name():
    assert source_of("digits").reference == "paceline.tasks.digits:Digits"
    assert source_of(Lines).reference == "tests.dist.launch.lines:Lines"
    assert source_of(Lines).shipped is None
    assert type(made(Lines, lr=1)) is Lines
    assert made(Lines, lr=1).lr == 1.0


def test_an_object_goes_with_what_it_has():
    task = Lines(lr=0.5)
    task.extra = [1, 2]
    again = made(task)
    assert type(again) is Lines
    assert again is not task
    assert (again.lr, again.extra) == (0.5, [1, 2])


def test_what_cannot_be_a_task_is_told_why():
    class Inner(Lines):
        pass

    for given, words in (
        (5, "task is 5, but must be a class or an instance of paceline.Task, or text"),
        (dict, "task is the class dict, but"),
        (lambda run: run, "but must be a class .* A loop of your own starts with paceline.launch"),
        (Inner, "Inner is defined inside a function of a file"),
        ("nothing", "unknown task 'nothing'"),
    ):
        with pytest.raises(InputError, match=words):
            source_of(given)
    held = Lines()
    held.lock = threading.Lock()
    with pytest.raises(InputError, match=r"Lines uses lock \(a lock\), which cannot be sent .*_thread.lock"):
        source_of(held)


@pytest.mark.parametrize(
    ("settings", "task", "texts"),
    [
        ({"lr": 0.5, "width": 3}, Lines, {"lr": "0.5", "width": "3"}),
        ({"lr": 1}, Lines, {"lr": "1"}),
        ({"name": "a", "y": True, "sizes": [1], "no": None}, "digits", {"name": "a", "y": "True", "sizes": "[1]", "no": "None"}),
    ],
)  # fmt: skip
def test_settings_are_those_of_the_command(settings, task, texts):
    assert texts_of(settings, task) == texts


@pytest.mark.parametrize(
    ("settings", "task", "words"),
    [
        ({"width": "3"}, Lines, r"settings=\{'width': '3'\} would reach the workers as 3"),
        ({"data": Lines}, "digits", "would reach the workers as"),
        ({"lr": float("nan")}, "digits", "would reach the workers as 'nan'"),
        ({"lx": 1}, Lines, "Did you mean 'lr'"),
        ({"lr": 1}, Lines(), "Give them to Lines"),
        (5, Lines, "settings is 5, but must be a mapping"),
    ],
)
def test_a_setting_that_would_arrive_as_another_is_refused(settings, task, words):
    with pytest.raises(InputError, match=words):
        texts_of(settings, task)


CELL = """
class Cell(Lines):
    scale = 3

    def model(self):
        return factor * self.scale


def late():
    return open_file
"""


@pytest.fixture
def cell(monkeypatch, tmp_path):
    """A namespace like a notebook's, in which a class is defined."""
    held = {"__name__": "__main__", "Lines": Lines, "factor": 7}
    exec(compile(CELL, "<cell 1>", "exec"), held)  # noqa: S102
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert script.script() is None
    with (tmp_path / "file").open("w") as file:
        held["open_file"] = file
        yield held


def test_what_a_cell_defines_goes_with_its_code(cell):
    kind = cell["Cell"]
    assert made(kind, lr=2).model() == 21
    assert type(made(kind)) is type(made(kind))
    changed = kind(lr=3)
    changed.scale = 4
    assert (made(changed).lr, made(changed).model()) == (3, 28)


def test_what_cannot_go_with_the_code_of_a_cell_is_named(cell):
    cell["factor"] = cell["open_file"]
    with pytest.raises(
        InputError, match=r"Cell\.model uses factor \(a TextIOWrapper\), which .*an open file, '.*file'"
    ):
        source_of(cell["Cell"])
    with pytest.raises(InputError, match=r"late uses open_file \(a TextIOWrapper\)"):
        paceline.launch(cell["late"])

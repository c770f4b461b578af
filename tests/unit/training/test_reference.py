"""Finding the user's Task, and reading `--set key=value` as what its constructor takes."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from paceline import Best, Task
from paceline.errors import InputError
from paceline.training import task_folder
from paceline.training.reference import arguments, check_task, load_task

ONE = "import paceline\nclass Mine(paceline.Task):\n    def __init__(self, lr: float = 0.1) -> None:\n        self.lr = lr\n"


@pytest.fixture(autouse=True)
def imports_undone() -> Iterator[None]:
    """Forget what a test imported, and where from."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("user_task"):
            del sys.modules[name]


def written(folder: Path, text: str) -> str:
    path = folder / "user_task.py"
    path.write_text(text)
    return str(path)


def test_by_file_with_or_without_the_class(tmp_path: Path) -> None:
    path = written(tmp_path, ONE)
    assert load_task(f"{path}:Mine", {"lr": "3e-4"}).lr == 3e-4  # type: ignore[attr-defined]
    assert type(load_task(path, {})).__name__ == "Mine"


def test_a_file_beside_it_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "user_task_parts.py").write_text("LR = 7.0\n")
    path = written(tmp_path, "from user_task_parts import LR\n" + ONE.replace("0.1", "LR"))
    assert load_task(path, {}).lr == 7.0  # type: ignore[attr-defined]


def test_by_module() -> None:
    assert load_task("tests.contract.tasks:Classify", {"samples": "5"}).samples == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("nowhere.py:Mine", "there is no file nowhere.py"),
        ("no_such_module:Mine", "there is no module 'no_such_module'"),
        ("../elsewhere/task:Mine", "'../elsewhere/task' is no name of a module. Give path.py:Class"),
        (".task:Mine", "'.task' is no name of a module"),
        ("tests.contract.nothing:Mine", "there is no module 'tests.contract.nothing'"),
        ("tests.contract.tasks:Clasify", "unknown class .*'Clasify'. Did you mean 'Classify'"),
        ("tests.contract.tasks:drawn", "is a function, not a paceline.Task"),
        ("tests.contract.jobs:Job", "is a type, not a paceline.Task. Write class Job"),
        ("tests.contract.tasks", r"holds 4 tasks \(Classify, Scheduled, Tokens, Balanced\). Say which one"),
        ("tests.contract.jobs", r"holds 0 tasks \(none\)"),
    ],
)
def test_what_is_not_a_task(reference: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_task(reference, {})


def test_a_module_that_fails_by_itself_is_not_missing(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_task(written(tmp_path, "import no_such_dependency\n"), {})


class Taking(Task):
    """One argument of each kind."""

    def __init__(
        self,
        needed: Any,
        lr: float = 0.1,
        width: int = 8,
        deep: bool = False,
        kind: str = "a",
        sizes: tuple[int, ...] = (1, 2),
        other: Any = None,
    ) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("needed", "3", 3),
        ("needed", "text with spaces", "text with spaces"),
        ("lr", "3e-4", 3e-4),
        ("lr", "1", 1.0),
        ("width", "16", 16),
        ("deep", "true", True),
        ("deep", "False", False),
        ("kind", "7", "7"),
        ("kind", "none", "none"),
        ("sizes", "(3, 4)", (3, 4)),
        ("other", "[1, 'x']", [1, "x"]),
        ("other", "None", None),
        ("other", "{[1]}", "{[1]}"),  # no literal, though it looks like one
    ],
)
def test_a_setting(name: str, text: str, value: Any) -> None:
    made = arguments(Taking, {"needed": "0", name: text})
    assert made[name] == value
    assert type(made[name]) is type(value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "Taking needs needed. Give --set needed=VALUE"),
        ({"needed": "1", "lrr": "1"}, "unknown option of Taking 'lrr'. Did you mean 'lr'"),
        ({"needed": "1", "lr": "fast"}, "--set lr=fast: Taking wants a float like 0.1"),
        ({"needed": "1", "lr": "true"}, "--set lr=true: Taking wants a float"),
        ({"needed": "1", "width": "1.5"}, "--set width=1.5: Taking wants a int like 8"),
        ({"needed": "1", "width": "True"}, "--set width=True: Taking wants a int"),
        ({"needed": "1", "deep": "maybe"}, "--set deep=maybe: Taking wants a bool like False"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        arguments(Taking, settings)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("keep_best", 2, "Task.keep_best is 2, but must be a paceline.Best."),
        ("keep_best", Best, "but must be a paceline.Best."),
        ("early_stopping", False, "Task.early_stopping is False, but must be a paceline.EarlyStopping."),
        ("average", 0.9, "Task.average is 0.9, but must be a paceline.Average."),
        ("on_step", 3, "Task.on_step is 3, but must be a method."),
        ("state", {"a": {}}, "Task.state is {'a': {}}, but must be a method."),
    ],
)
def test_an_attribute_of_another_kind_is_refused(name: str, value: Any, words: str) -> None:
    task = Task()
    setattr(task, name, value)
    with pytest.raises(InputError, match=re.escape(words)):
        check_task(task)


def folder_with(folder: Path, act: str) -> str:
    """A task's file with a module beside it, of names that other folders have too."""
    folder.mkdir()
    (folder / "user_task_parts.py").write_text(f"ACT = '{act}'\nLATE = '{act}'\n")
    text = ONE.replace("self.lr", "self.act = ACT\n        self.lr")
    text += "    def late(self):\n        from user_task_parts import LATE\n        return LATE\n"
    return written(folder, "from user_task_parts import ACT\n" + text)


def test_each_of_two_files_has_its_own_neighbours(tmp_path: Path) -> None:
    one, other = folder_with(tmp_path / "one", "relu"), folder_with(tmp_path / "other", "tanh")
    sys.path.insert(0, task_folder._Entered(tmp_path))  # as a task before has left it
    before = task_folder.search_path()
    first: Any = load_task(one, {})
    for path, act in ((other, "tanh"), (one, "relu"), (other, "tanh")):
        task: Any = load_task(path, {})
        assert (task.act, task.late()) == (act, act)
        assert sys.path == [str(Path(path).parent), *before]
        assert type(pickle.loads(pickle.dumps(task))) is type(task)  # noqa: S301  (its own)
    again: Any = load_task(one, {})
    assert type(again) is type(first), "the file was read twice"


def test_a_neighbour_of_the_script_stays_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_task_parts.py").write_text("ACT = 'the script'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own: Any = importlib.import_module("user_task_parts")
    task: Any = load_task(folder_with(tmp_path / "one", "relu"), {})
    assert task.act == "relu"
    assert sys.modules["user_task_parts"] is own


TASK = ONE.replace("self.lr", "self.scale = SCALE\n        self.lr")


def packages(folder: Path, *, regular: bool, scale: int, name: str = "user_task_pack") -> str:
    """A task's file with a package beside it, of a name that other folders have too."""
    (folder / name).mkdir(parents=True)
    (folder / name / "net.py").write_text(f"SCALE = {scale}\n")
    (folder / name / "late.py").write_text(f"SCALE = {scale}\n")
    if regular:
        (folder / name / "__init__.py").touch()
    return written(folder, f"from {name}.net import SCALE\nimport {name}.net as net\n" + TASK)


@pytest.mark.parametrize("kinds", [(False, False), (True, False), (False, True)], ids=str)
def test_packages_of_one_name_are_of_their_own_folders(kinds: tuple[bool, bool], tmp_path: Path) -> None:
    one = packages(tmp_path / "one", regular=kinds[0], scale=1)
    other = packages(tmp_path / "other", regular=kinds[1], scale=100)
    before = list(sys.path)
    for path, scale in ((one, 1), (other, 100), (one, 1), (other, 100)):
        task: Any = load_task(path, {})
        assert task.scale == scale
        late = importlib.import_module("user_task_pack.late")
        assert scale == late.SCALE
        net = importlib.import_module("user_task_pack").net
        assert scale == net.SCALE
        assert vars(sys.modules[type(task).__module__])["net"] is net
        if scale == 100:
            sys.path[:] = before  # as after a launch in a world that is joined


def test_a_package_of_the_script_does_not_stand_before_one_without_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(tmp_path, regular=True, scale=5)
    monkeypatch.syspath_prepend(str(tmp_path))
    task: Any = load_task(packages(tmp_path / "one", regular=False, scale=1), {})
    assert task.scale == 1


def test_a_folder_of_data_hides_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(tmp_path, regular=True, scale=5)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = packages(tmp_path / "one", regular=False, scale=1)
    for file in (tmp_path / "one" / "user_task_pack").iterdir():
        file.unlink()
    task: Any = load_task(path, {})
    assert task.scale == 5


def test_a_package_that_a_library_has_a_part_of_changes_its_other_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "site-packages"
    (library / "user_task_pack").mkdir(parents=True)
    (library / "user_task_pack" / "base.py").touch()
    monkeypatch.syspath_prepend(str(library))
    base = importlib.import_module("user_task_pack.base")
    for folder, scale in (("one", 1), ("other", 100), ("one", 1)):
        path = tmp_path / folder / "user_task.py"
        if not path.exists():
            packages(tmp_path / folder, regular=False, scale=scale)
        task: Any = load_task(str(path), {})
        assert task.scale == scale
        assert scale == importlib.import_module("user_task_pack").net.SCALE
        assert importlib.import_module("user_task_pack.base") is base


def test_a_helper_of_the_name_of_a_module_of_pythons_is_of_its_own_folder(tmp_path: Path) -> None:
    unused = next(name for name in sorted(sys.stdlib_module_names - sys.modules.keys()) if name[0] != "_")
    for folder, scale in (("one", 1), ("other", 100)):
        path = packages(tmp_path / folder, regular=True, scale=scale, name=unused)
        task: Any = load_task(path, {})
        assert task.scale == scale
    for name in (unused, f"{unused}.net"):
        del sys.modules[name]


@pytest.mark.parametrize("line", ["from random import SCALE", "import random; SCALE = random.SCALE"])
def test_a_helper_that_hides_behind_a_module_of_pythons_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("SCALE = 4\n")
    path = written(tmp_path, f"{line}\n" + TASK)
    with pytest.raises(
        InputError, match="Python's own module random is loaded already, and goes by it"
    ) as caught:
        load_task(path, {})
    assert str(caught.value).startswith(f"{tmp_path}/random.py cannot be imported by its name")
    (tmp_path / "random.py").unlink()
    with pytest.raises((ImportError, AttributeError)):
        load_task(written(tmp_path, f"{line}\n\n" + TASK), {})


class Raises(types.ModuleType):
    """A module that loads late, and cannot."""

    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


def test_a_module_that_raises_when_it_is_asked_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "user_task_lazy", Raises("user_task_lazy"))
    monkeypatch.setitem(sys.modules, "user_task_number", cast("Any", 5))
    assert not task_folder.is_own(sys.modules["user_task_lazy"])
    assert not task_folder.is_own(sys.modules["user_task_number"])
    load_task(written(tmp_path, ONE), {})

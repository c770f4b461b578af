"""`paceline new`: the project that it makes trains and passes its tests as they stand."""

import subprocess
import sys

import pytest


def test_a_new_project_trains_and_passes_its_tests(command, folder, monkeypatch):
    ended = command("new", "my_project")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.splitlines()[0] == "made my_project. Next:"
    made = folder / "my_project"
    names = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert names == {
        ".gitignore", "README.md", "config.toml", "pyproject.toml", "task.py", "tests/test_task.py"
    }  # fmt: skip
    assert 'name = "my_project"' in (made / "pyproject.toml").read_text()
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=made, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "1 passed" in tested.stdout
    monkeypatch.chdir(made)
    ended = command("train", "--config", "config.toml", "--epochs", 2, "--out", "runs/first")
    assert ended.status == 0, ended.err
    assert (made / "runs" / "first" / "metrics.csv").exists()


@pytest.mark.parametrize("name", ["7up", "-x", "a b", "name-", "naïve", "x" * 65, "a/b c"])
def test_an_odd_name_is_refused(command, folder, name):
    ended = command("new", "--", name)
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "is no name of a Python project" in ended.err
    assert list(folder.iterdir()) == []


def test_a_folder_with_something_in_it_is_left_alone(command, folder):
    (folder / "there").mkdir()
    (folder / "there" / "mine").touch()
    (folder / "file").touch()
    for name in ("there", "file", "file/below"):
        ended = command("new", name)
        assert (ended.status, ended.err.count("\n")) == (2, 1), ended
    assert [path.name for path in (folder / "there").iterdir()] == ["mine"]
    (folder / "empty").mkdir()
    assert command("new", "empty").status == 0

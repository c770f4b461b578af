"""The wheel and the source archive, installed where nothing else of this folder is seen."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="the package is built with it: the dev extra has it")
REPOSITORY = Path(__file__).parents[3]
SOURCES = {
    path.relative_to(REPOSITORY / "src").as_posix()
    for path in (REPOSITORY / "src" / "paceline").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}
IMPORT_ALL = """
import importlib, pkgutil, sys
import paceline
here = paceline.__path__[0]
assert here.startswith(sys.prefix), here
failed, found = [], 0
optional = ("mpi4py", "ray", "gymnasium", "sklearn", "wandb", "mlflow", "tensorboard", "torchdata", "triton")
for one in pkgutil.walk_packages([here], "paceline."):
    if one.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(one.name)
        found += 1
    except ImportError as error:
        if not (error.name or "").startswith(optional):
            raise
print(found)
"""


def run(*words, folder=REPOSITORY):
    ended = subprocess.run(
        [*map(str, words)], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The two archives, and a virtual environment with the wheel; torch and the others are those of this one."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    home = folder / "clean"
    venv.create(home, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    # A .pth in a folder that a .pth names is not read: the copy that tests run on stays unseen.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        home / "bin" / "python",
        "install",
        "--no-deps",
        "--no-index",
    )
    run(*pip, "--ignore-installed", "--quiet", "--no-warn-script-location", wheel)
    return wheel, source, home


def test_no_file_is_missing(built):
    wheel, source, _ = built
    with zipfile.ZipFile(wheel) as archive:
        held = {*archive.namelist()}
    assert {name for name in held if ".dist-info/" not in name} == SOURCES
    assert "paceline/py.typed" in held
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in SOURCES} | {"LICENSE", "README.md", "pyproject.toml"} <= names
    assert not any(name.startswith((".venv", "runs/", "shared/")) for name in names)


def test_what_the_package_says_of_itself(built):
    with zipfile.ZipFile(built[0]) as archive:
        (place,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        told = archive.read(place).decode()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for extra in project["optional-dependencies"]:
        assert f"Provides-Extra: {extra}\n" in told
    assert "License-Expression: Apache-2.0" in told
    assert "Classifier: Typing :: Typed" in told


def test_the_installed_package_works_in_a_folder_of_its_own(built, tmp_path):
    home = built[2]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    assert os.environ.get("PYTHONPATH") is None or "PYTHONPATH" not in clean
    count = int(run(home / "bin" / "python", "-W", "error::SyntaxWarning", "-c", IMPORT_ALL, folder=tmp_path))
    modules = [name for name in SOURCES if name.endswith(".py") and not name.endswith("__main__.py")]
    assert count > 0.95 * len(modules)
    assert "Start a script on several processes" in run(home / "bin" / "paceline", "--help", folder=tmp_path)
    assert "digits" in run(home / "bin" / "paceline", "tasks", folder=tmp_path)
    told = run(
        *(
            home / "bin" / "paceline",
            "train",
            "addition",
            "--steps",
            "2",
            "--workers",
            "2",
            "--out",
            "run",
            "--json",
        ),
        folder=tmp_path,
    )
    assert '"steps": 2' in told

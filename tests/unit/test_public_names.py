"""The public face: exactly these names, each importable, none of them at the price of loading torch."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import paceline
from paceline import errors
from tests.patience import HANG_S

PUBLIC = [
    "Average",
    "Best",
    "CheckpointInfo",
    "Collected",
    "Comm",
    "EarlyStopping",
    "EpochInfo",
    "EvalInfo",
    "InputError",
    "Loss",
    "Mean",
    "OnMetric",
    "PacelineError",
    "PerEpoch",
    "Result",
    "Run",
    "Step",
    "StepInfo",
    "Task",
    "WorkerFailedError",
    "World",
    "__version__",
    "launch",
    "launch_roles",
    "load",
    "resume",
    "train",
    "verify",
]


def test_the_list_is_the_documented_one():
    assert paceline.__all__ == PUBLIC


def test_a_loop_sees_these_names_of_its_run():
    names = [name for name in dir(paceline.Run) if not name.startswith("_")]
    assert names == [
        *("compile", "evaluate", "loader", "log", "predict", "prepare", "register", "replaying"),
        *("save", "steps", "stop", "weights_sha256", "world"),
    ]


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_is_there(name):
    namespace = {}
    exec(f"from paceline import {name}", namespace)  # noqa: S102
    assert namespace[name] is getattr(paceline, name)
    assert name in dir(paceline) or name in ("__version__", "launch", "verify")


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        paceline.nothing  # noqa: B018


@pytest.mark.parametrize("name", ["launch", "verify"])
def test_a_verb_and_a_room(name):
    room = importlib.import_module(f"paceline.{name}")
    assert getattr(paceline, name) is room
    assert callable(room)
    assert "workers" in inspect.signature(room).parameters


def test_what_trains_says_what_it_takes():
    trains = inspect.signature(paceline.train).parameters
    assert (trains["steps"].default, trains["workers"].default) == (None, 1)
    assert "out" not in inspect.signature(paceline.resume).parameters
    assert {"strategy", "batch_size", "compress"} <= trains.keys()


def test_every_error_is_in_one_tree():
    made = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Exception)]
    assert len(made) == 14
    assert all(issubclass(one, paceline.PacelineError) for one in made)


def test_importing_the_package_loads_no_torch():
    check = "import sys, paceline, paceline.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=HANG_S, check=False).returncode == 0


def test_no_name_of_a_package_is_hidden_by_a_module_of_the_same_name():
    # Importing a module sets it as an attribute of its package, over whatever had the name.
    packages = [paceline.__name__] + [
        one.name for one in pkgutil.walk_packages(paceline.__path__, "paceline.") if one.ispkg
    ]
    hidden = {}
    for name in packages:
        package = importlib.import_module(name)
        modules = {one.name for one in pkgutil.iter_modules(package.__path__)}
        both = modules & set(getattr(package, "__all__", ()))
        hidden |= {f"{name}.{one}": importlib.import_module(f"{name}.{one}") for one in both}
    assert {name for name, module in hidden.items() if not callable(module)} == set()

"""Every number that a user can give has a range; nan, infinity and what would exhaust the machine lie in none."""

from __future__ import annotations

import importlib
import json
import math
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.cli.application import app
from paceline.errors import InputError
from paceline.launch.base import LaunchSpec
from paceline.launch.workers.process_limit import check_process_limit, limit
from paceline.option_fields import Options, ranged, shown
from paceline.ranges import COUNT, TASK, Range
from paceline.strategies.tuning import Tuning
from paceline.training import folder
from paceline.training.options import RunOptions
from paceline.training.reference import load_task
from paceline.training.spec import TrainSpec

HUGE = 10**20
EVERYWHERE = [math.nan, math.inf, -math.inf, HUGE, -HUGE, 10**5000, "7", True, 1.5j]


def options_classes() -> list[type[Options]]:
    """Every class of options there is."""
    source = Path(paceline.__path__[0])
    for path in sorted(source.rglob("*.py")):
        if "(Options)" in path.read_text():
            importlib.import_module(".".join(("paceline", *path.relative_to(source).with_suffix("").parts)))
    found, waiting = [], [Options]
    while waiting:
        below = waiting.pop().__subclasses__()
        found += below
        waiting += below
    return [one for one in found if one.__module__.startswith("paceline.")]


def numbers(options: type[Options]) -> list[str]:
    hints = typing.get_type_hints(options)
    plain = {one.name: set(typing.get_args(hints[one.name])) | {hints[one.name]} for one in fields(options)}  # type: ignore[arg-type]
    return [name for name, kinds in plain.items() if kinds & {int, float, tuple[int, ...]}]


def test_every_number_of_every_class_of_options_has_a_range() -> None:
    found = {(one.__module__, one.__name__): numbers(one) for one in options_classes()}
    names = {name for _, name in found}
    assert {
        "RunOptions",
        "Tuning",
        "TrainSpec",
        "LaunchSpec",
        "VerifyRequest",
        "PlanRequest",
        "SegmentReplay",
    } <= names
    for one in options_classes():
        for item in fields(one):  # type: ignore[arg-type]
            if item.name in numbers(one):
                assert "range" in item.metadata, f"{one.__name__}.{item.name} is a number without a range"
                assert math.isfinite(item.metadata["range"].high)


def test_a_number_that_forgets_its_range_fails_at_once() -> None:
    @dataclass(frozen=True)
    class Forgetful(Options):
        many: int = 1

    with pytest.raises(TypeError, match=r"Forgetful.many is a number without a range"):
        Forgetful()


def test_every_number_among_a_tasks_attributes_has_a_range() -> None:
    hints = typing.get_type_hints(paceline.Task)
    kinds = {name: {hint, *typing.get_args(hint)} for name, hint in hints.items()}
    # What may be text too ("50", "2 epochs") is read as such, its numbers included.
    named = [name for name, kind in kinds.items() if kind & {int, float} and str not in kind]
    assert sorted(named) == sorted(TASK)


@pytest.mark.parametrize("kind", [RunOptions, Tuning, TrainSpec, LaunchSpec], ids=lambda one: one.__name__)
def test_no_class_takes_a_number_that_is_none(kind: type[Options]) -> None:
    needed: dict[str, Any] = {
        TrainSpec: {"task": "digits", "name": "digits"},
        LaunchSpec: {"call": print, "workers": 1},
    }.get(kind, {})
    hints = typing.get_type_hints(kind)
    for name in numbers(kind):
        for value in EVERYWHERE:
            if isinstance(value, str) and str in typing.get_args(hints[name]):
                continue
            with pytest.raises(InputError) as caught:
                kind(**{**needed, name: value})
            assert str(caught.value).startswith(f"--{name.replace('_', '-')} is "), (name, value)
            assert len(str(caught.value)) < 200
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"out": ""}, "out is '', which is no path"),
        ({"out": "x" * 300}, "a name of 300 bytes"),
        ({"out": "a\0b"}, "which is no path"),
        ({"out": 5}, "must be the path of a folder"),
        ({"save_every": "", "out": "x"}, "save_every='' is neither"),
        ({"save_every": 0, "out": "x"}, "save_every is 0, but must be at least 1"),
        ({"save_every": "\uff11", "out": "x"}, "is neither"),
        ({"save_every": str(HUGE), "out": "x"}, "is neither"),
        ({"save_every": 1.5, "out": "x"}, "save_every is 1.5, but must be a whole number"),
        ({"nodes": "\uff12"}, "is no number of machines"),
        ({"nodes": "0"}, "is no number of machines"),
        ({"nodes": str(HUGE)}, "is no number of machines"),
        ({"nodes": 1.0}, "nodes is 1.0, but must be a whole number"),
        ({"resume": 1}, "resume is 1, but must be True or False"),
        ({"strategy": None}, "strategy is None, but must be text"),
        ({"worker": 2}, "unknown option 'worker'. Did you mean 'workers'?"),
        ({"thread": 2}, "unknown option 'thread'. Did you mean 'threads'?"),
        ({"kwarg": {}}, "unknown option 'kwarg'. Did you mean 'kwargs'?"),
        ({"reshards": True}, "kwargs"),
        (
            {"batch_size": 4},
            "batch_size is no option of launch. It belongs to run.steps(data, batch_size=4) in a loop of your own, or to",
        ),
        ({"epochs": 4}, "It belongs to run.steps(data, epochs=4) in a loop of your own, or to the Task"),
        (
            {"steps": 4},
            "It belongs to run.steps(data, steps=4) in a loop of your own; for a Task it is an option",
        ),
        (
            {"max_grad_norm": 1.0},
            "It belongs to step.apply(max_grad_norm=1.0) or run.steps(data, max_grad_norm=1.0)",
        ),
        ({"horizon": 9}, "It belongs to the schedule that a loop of your own makes; for a Task"),
        ({"shard": 2}, "unknown option 'shard'. Did you mean 'shards'?"),
        ({"tuning": {"compres": "bf16"}}, "unknown option of a strategy 'compres'. Did you mean 'compress'?"),
        ({"tuning": {"compress": "powersgd:\uff19"}}, "is none of bf16"),
        ({"tuning": {"compress": f"powersgd:{HUGE}"}}, "is none of bf16"),
        ({"workers": 1025}, "workers is 1025, but must be at most 1024"),
        ({"threads": 1_000_000}, "threads is 1000000, but must be at most 1024"),
        ({"threads": True}, "threads is True, but must be a whole number"),
        ({"seed": -1}, "seed is -1, but must be at least 0"),
        ({"seed": 10**26}, "seed is 1000000000"),
    ],
)
def test_what_launch_does_not_take(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        paceline.launch(test_numbers_of_other_kinds, **given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_of_other_kinds() -> None:
    made = RunOptions(
        workers=np.int64(2), shards=np.uint8(4), hang_timeout=5, save_every=50, nodes=1, out="x"
    )  # type: ignore[arg-type]
    assert (made.workers, made.shards, made.hang_timeout) == (2, 4, 5.0)
    assert (made.save_every, made.nodes, made.out) == ("50", "1", Path("x"))
    assert [type(one) for one in (made.workers, made.shards, made.hang_timeout)] == [int, int, float]
    json.dumps([made.workers, made.shards])
    assert Range(0, 1, whole=False).read("it", np.float32(0.5)) == 0.5


ODD = """
import paceline
class Odd(paceline.Task):
    def __init__(self, lr: float = 0.1, width: int = 4, **attributes):
        for name, value in {attributes}.items(): setattr(self, name, value)
"""


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ("{'batch_size': 0}", "Odd.batch_size is 0, but must be at least 1"),
        ("{'batch_size': 1.5}", "Odd.batch_size is 1.5, but must be a whole number"),
        ("{'batch_size': None}", "Odd.batch_size is None, but must be a whole number"),
        ("{'batch_size': 10**20}", "Odd.batch_size is 100000000000000000000, but must be at most"),
        ("{'max_grad_norm': float('nan')}", "Odd.max_grad_norm is nan"),
        ("{'max_grad_norm': float('inf')}", "Odd.max_grad_norm is inf"),
        ("{'max_grad_norm': 0}", "Odd.max_grad_norm is 0, but must be above 0"),
        ("{'epochs': -1}", "Odd.epochs is -1"),
        ("{'seed': -1}", "Odd.seed is -1"),
        ("{'shards': 0}", "Odd.shards is 0"),
        ("{'shards': '8'}", "Odd.shards is '8'"),
        ("{'micro_batch': 0}", "Odd.micro_batch is 0"),
        ("{'num_workers': -1}", "Odd.num_workers is -1"),
        ("{'precision': 'fp8'}", "unknown precision of Odd 'fp8'"),
    ],
)
def test_attributes_of_a_task(attributes: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD.replace("{attributes}", f"({attributes})"))
    with pytest.raises(InputError) as caught:
        load_task(f"{path}:Odd", {})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text", ["lr=1e999", "lr=-1e999", f"width={10**20}", f"width={'9' * 5000}", "lr=nan", "width=inf"]
)
def test_numbers_of_set(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD.replace("{attributes}", "{}"))
    name, _, value = text.partition("=")
    with pytest.raises(InputError, match=f"--set {name}="):
        load_task(f"{path}:Odd", {name: value})


def numeric_options() -> list[tuple[str, str]]:
    """Every option of every command that takes a number."""
    found = []
    for command in app.registered_commands:
        assert command.callback is not None
        for name, hint in typing.get_type_hints(command.callback, include_extras=True).items():
            plain, *extras = typing.get_args(hint) or (hint,)
            if {plain, *typing.get_args(plain)} & {int, float} and extras:
                spelled = [one for one in extras[0].param_decls or () if one.startswith("--")]
                found.append((command.name or "", spelled[0] if spelled else f"--{name.replace('_', '-')}"))
    assert len(found) > 40
    return found


BEGIN = {
    "train": ["digits", "--dry-run"],
    "verify": ["digits"],
    "chaos": ["digits"],
    "run": [__file__],
    "rollouts": ["cartpole"],
    "collectives": [],
    "predict": ["nowhere", "--out", "made.npy"],
    "resize": ["nowhere"],
    "submit": ["digits", "--on", "slurm", "--dry-run"],
    "doctor": ["--hosts", "127.0.0.1"],
}


@pytest.mark.parametrize(("command", "option"), numeric_options())
def test_no_command_takes_a_number_that_is_none(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.launch.local.LocalLauncher.launch", _started)
    monkeypatch.setattr("paceline.verify.script.check.verify_script", _started)
    for value in ("nan", "inf", str(HUGE), f"-{HUGE}", "0x10", ""):
        arguments = [command, option, value, *BEGIN[command]]
        with pytest.raises(Exception, match=r"\A.+\Z") as caught:  # one line
            app(args=arguments, standalone_mode=False)
        # Ours, or what the command line itself says of its arguments.
        assert isinstance(caught.value, InputError) or hasattr(caught.value, "format_message"), arguments
    assert not list(tmp_path.iterdir())


def _started(*_: object, **__: object) -> None:
    raise AssertionError("something was started")


def test_a_spec_with_the_wrong_types_is_refused(tmp_path: Path) -> None:
    for text in ("[]", '{"options": 5}', '{"options": {"tuning": 3}}', '{"overrides": {"sed": 1}}'):
        (tmp_path / "spec.json").write_text(text)
        with pytest.raises(InputError, match="is damaged"):
            folder.read_spec(tmp_path)


def test_more_threads_than_the_machine_can_spare_process_ids_for() -> None:
    check_process_limit(2, 1)
    with pytest.raises(InputError, match="Use fewer --workers or --threads"):
        check_process_limit(limit() // 2, 1)
    with pytest.raises(InputError, match="1,024 workers with 1,024 threads each need about 1,0"):
        check_process_limit(1024, 1024)
    assert limit() > 100


def test_a_default_outside_its_own_range_fails() -> None:
    @dataclass(frozen=True)
    class Wrong(Options):
        many: int = ranged(0, COUNT)

    with pytest.raises(InputError, match="the default of many is 0"):
        Wrong()


def test_every_option_of_a_task_has_its_place_in_a_loop() -> None:
    of_task = {one.name for one in fields(TrainSpec) if shown(one)}
    for name in of_task:
        with pytest.raises(InputError, match=f"{name} is no option of launch. It belongs to "):
            paceline.launch(test_numbers_of_other_kinds, **{name: 1})

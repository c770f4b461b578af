"""`paceline.launch` takes the options as keywords, and says what is wrong in those words."""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

import paceline
from paceline.errors import InputError, UnknownNameError
from paceline.launch.in_python import errors_in_keywords, in_keywords, keywords, run_options
from paceline.launch.keywords import LaunchOptions
from paceline.strategies.tuning import Tuning
from paceline.training.options import RunOptions


def test_the_written_keywords_are_those_of_the_options():
    written = get_type_hints(LaunchOptions)
    named = {"workers", "strategy", "out"}
    expected = {name: hint for name, (_, hint) in keywords().items() if name not in named}
    assert written == {**expected, "tuning": Mapping[str, Any] | Tuning}


def test_the_signature_shows_them_with_their_defaults():
    found = inspect.signature(paceline.launch).parameters
    every = {one.name: one for kind in (RunOptions, Tuning) for one in fields(kind)}
    assert found.keys() >= every.keys() - {"shards_from"}
    assert (found["hang_timeout"].default, found["hang_timeout"].annotation) == (60.0, float)
    assert found["local_steps"].default == 8


def test_values_have_types():
    made = run_options(
        {"save_every": 50, "out": "run", "nodes": 1, "strategy": "local-sgd", "local_steps": 3}
    )
    assert made == RunOptions(save_every="50", out="run", strategy="local-sgd", tuning=Tuning(local_steps=3))
    both = run_options(
        {"tuning": {"activation_checkpointing": "blocks"}, "activation_checkpointing_every": 2}
    )
    assert both.tuning == Tuning(activation_checkpointing="blocks", activation_checkpointing_every=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"worker": 2}, "unknown option 'worker'. Did you mean 'workers'?"),
        ({"save_every": 5}, "save_every= needs a folder to save into. Give out=."),
        ({"save_every": 0, "out": "x"}, "save_every is 0, but must be at least 1."),
        ({"save_every": "x", "out": "x"}, "save_every='x' is neither a number of steps"),
        ({"workers": 0}, "workers is 0, but must be at least 1."),
        ({"compile": 1}, "compile is 1, but must be True or False."),
        ({"workers": 3, "shards": 2}, "Use workers=2 or fewer, or shards=3 or more."),
        ({"strategy": "ddp=2,tp=2", "workers": 3}, "strategy='ddp=2,tp=2' needs 4 workers"),
        ({"local_steps": 3}, "local_steps is an option of local-sgd, and strategy='ddp' has no use for it."),
        ({"resume": True}, "resume=True needs the folder of the run to resume. Give out=."),
    ],
)
def test_errors_name_keywords(given, words):
    with pytest.raises(InputError) as caught, errors_in_keywords():
        run_options(given)
    assert words in str(caught.value)
    assert "--" not in str(caught.value)


def test_what_is_no_option_stays_as_it_is():
    assert in_keywords("Give --set lr=2, or --script.") == "Give --set lr=2, or --script."
    assert in_keywords("Use --strategy single, dp or ddp, or leave it out.") == (
        "Use strategy='single', 'dp' or 'ddp', or leave it out."
    )
    assert in_keywords("Use --workers 2 or fewer.") == "Use workers=2 or fewer."
    assert in_keywords("--no-elastic and --nodes 1:4") == "elastic=False and nodes='1:4'"


def test_an_error_keeps_its_kind():
    with pytest.raises(UnknownNameError), errors_in_keywords():
        raise UnknownNameError("--workers", "a", ["b"])

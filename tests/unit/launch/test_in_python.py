"""`paceline.launch` takes the options as keywords, and says what is wrong in those words."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import paceline
from paceline.errors import InputError, UnknownNameError
from paceline.launch.api import choose_shards
from paceline.launch.in_python import errors_in_keywords, in_keywords, keywords, run_options
from paceline.launch.keywords import LaunchOptions
from paceline.strategies.tuning import Tuning
from paceline.training.folder import write_spec
from paceline.training.options import RunOptions
from tests.unit.launch.keywords import FILE, generated


def test_the_written_keywords_are_those_of_the_options():
    assert FILE.read_text(encoding="utf-8") == generated(), "run: python -m tests.unit.launch.keywords"
    written = get_type_hints(LaunchOptions)
    expected = {name: hint for name, (_, hint) in keywords().items()}
    sinks = str | type | Sequence[str | type] | None
    assert written == {
        **expected,
        "tuning": Mapping[str, Any] | Tuning,
        "out": str | Path | None,
        "sink": sinks,
    }


def test_the_signature_shows_them_with_their_defaults():
    found = inspect.signature(paceline.launch).parameters
    every = {one.name: one for kind in (RunOptions, Tuning) for one in fields(kind)}
    assert found.keys() >= every.keys() - {"shards_from"}
    assert (found["hang_timeout"].default, found["hang_timeout"].annotation) == (60.0, float)
    assert found["local_steps"].default == 8


def test_values_have_types():
    made, _, _ = run_options(
        {"save_every": 50, "out": "run", "nodes": 1, "strategy": "local-sgd", "local_steps": 3}
    )
    assert made == RunOptions(save_every="50", out="run", strategy="local-sgd", tuning=Tuning(local_steps=3))
    both, _, _ = run_options(
        {"tuning": {"activation_checkpointing": "blocks"}, "activation_checkpointing_every": 2}
    )
    assert both.tuning == Tuning(activation_checkpointing="blocks", activation_checkpointing_every=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"worker": 2}, "unknown option 'worker'. Did you mean 'workers'?"),
        ({"backend": "glo"}, "unknown backend='glo'. Did you mean 'gloo'?"),
        ({"on": "mpi"}, "on is no option of launch: it would start this script anew for each worker."),
        ({"hosts": "a,b"}, "Start the script with torchrun, mpirun or srun, which launch joins by itself"),
        ({"save_every": 5}, "save_every= needs a folder to save into. Give out=."),
        ({"save_every": 0, "out": "x"}, "save_every is 0, but must be at least 1."),
        ({"save_every": "x", "out": "x"}, "save_every='x' is neither a number of steps"),
        ({"workers": 0}, "workers is 0, but must be at least 1."),
        ({"compile": 1}, "compile is 1, but must be True or False."),
        ({"workers": 3, "shards": 2}, "Use workers=2 or fewer, or shards=3 or more."),
        ({"strategy": "ddp=2,tp=2", "workers": 3}, "strategy='ddp=2,tp=2' needs 4 workers"),
        ({"local_steps": 3}, "local_steps is an option of local-sgd, and strategy='ddp' has no use for it."),
        ({"resume": True}, "resume=True needs the folder of the run to resume. Give out=."),
        ({"strategy": ""}, "unknown strategy ''."),
        ({"out": "a\ud800"}, "out is 'a\\ud800', which no file system takes. Give another path."),
        ({"strategy": 5}, "strategy is 5, but must be text."),
        ({"workers": None}, "workers is None, but must be a whole number."),
        ({"bucket_mb": math.nan}, "bucket_mb is nan, but must be a number above 0"),
        ({"tuning": None}, "tuning is None, but must be a mapping of names to values, or a Tuning."),
        ({"tuning": 5, "local_steps": 2}, "tuning is 5, but must be a mapping"),
        (
            {"tuning": {"local_step": 2}},
            "unknown option of a strategy 'local_step'. Did you mean 'local_steps'?",
        ),
        (
            {"tuning": {"local_steps": 2}},
            "local_steps is an option of local-sgd, and strategy='ddp' has no use",
        ),
        (
            {"tuning": Tuning(local_steps=2)},
            "local_steps is an option of local-sgd, and strategy='ddp' has no use",
        ),
        (
            {"strategy": "local-sgd", "local_steps": 2, "tuning": {"local_steps": 3}},
            "local_steps is 2, and 3 in tuning. Give it in one place.",
        ),
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
    assert in_keywords("--strategy ddp=2,fsdp=2, which --strategy ddp=2,tp=2 fits.") == (
        "strategy='ddp=2,fsdp=2', which strategy='ddp=2,tp=2' fits."
    )
    assert in_keywords("Use --workers 2 or fewer.") == "Use workers=2 or fewer."
    assert in_keywords("--no-elastic and --nodes 1:4") == "elastic=False and nodes='1:4'"


def test_an_error_keeps_its_kind():
    with pytest.raises(UnknownNameError), errors_in_keywords():
        raise UnknownNameError("--workers", "a", ["b"])


BEGUN = {
    "workers": 2, "strategy": "ddp", "shards": 4, "seed": 7, "precision": "bf16", "micro_batch": 3, "num_workers": 1,
    "find_unused_parameters": True, "compile": True, "save_every": 3, "keep": 5, "keep_best": 2,
    "save_async": True, "hang_timeout": 33.0,
    "elastic": False, "min_workers": 2, "compress": "bf16", "shard_optimizer": True, "transport": "gloo",
}  # fmt: skip


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, RunOptions]:
    """A run folder as a launch leaves it, and the options that the run had."""
    made, _, _ = run_options({**BEGUN, "out": tmp_path})
    write_spec(tmp_path, {"threads": 1, "options": asdict(made)})
    return tmp_path, made


def test_a_resumed_run_keeps_every_option_that_is_not_said_again(begun):
    out, had = begun
    made, before, notes = run_options({"out": out, "resume": True})
    assert made == replace(
        had, resume=True, shards=None, shards_from=""
    )  # shards are looked up with the plan
    assert (before["threads"], notes) == (1, ())


def test_what_is_said_again_wins_and_a_flag_can_be_switched_off(begun):
    out, had = begun
    said = {"compile": False, "elastic": True, "save_every": None, "micro_batch": None, "keep": 1, "seed": 0}
    made, _, _ = run_options({"out": out, "resume": True, **said, "shard_optimizer": False})
    assert {name: getattr(made, name) for name in said} == said
    assert made.tuning == replace(had.tuning, shard_optimizer=False)
    whole, _, _ = run_options({"out": out, "resume": True, "tuning": Tuning(bucket_mb=2.0)})
    assert whole.tuning == Tuning(bucket_mb=2.0)


def test_what_the_rest_does_not_fit_to_is_fitted_with_a_note(begun):
    out, _ = begun
    made, _, notes = run_options({"out": out, "resume": True, "strategy": "single"})
    assert (made.strategy, made.workers, made.min_workers, made.tuning) == ("single", 1, 1, Tuning())
    assert "the run had 2 workers; strategy='single' goes on with 1 here." in map(in_keywords, notes)
    with pytest.raises(InputError, match="5 workers for 4 shards"):
        choose_shards(run_options({"out": out, "resume": True, "workers": 5, "shards": 4})[0], lambda: None)


def test_a_world_that_is_there_says_how_many_workers_a_resumed_run_has(begun, monkeypatch):
    out, _ = begun
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 3,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    made, _, notes = run_options({"out": out, "resume": True, "workers": 7})
    assert (made.strategy, made.workers, notes) == ("ddp", 3, ())
    monkeypatch.setenv("WORLD_SIZE", "1")
    alone, _, notes = run_options({"out": out, "resume": True})
    assert (alone.workers, alone.min_workers, len(notes)) == (1, 1, 1)


def test_a_folder_without_a_run_gives_nothing(tmp_path):
    made, before, notes = run_options({"out": tmp_path / "none", "resume": True})
    assert (made, before, notes) == (RunOptions(out=tmp_path / "none", resume=True), {}, ())

"""What a run is asked to do: the command line first, then a file, then what a resumed run had."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from paceline.cli.asked import Asked
from paceline.errors import InputError
from paceline.option_fields import shown
from paceline.strategies.tuning import Tuning
from paceline.training.options import RunOptions
from paceline.training.spec import TrainSpec

OUT = Path("run")
OTHER = {
    "shards": 8, "exact": "numeric", "device": "cpu", "compile": True, "transport": "gloo", "backend": "gloo",
    "check_collectives": True, "save_every": "7", "keep": 5, "keep_best": 4, "save_async": True,
    "peer_snapshots": 1, "snapshot_every": 3,
    "sink": "csv", "cuda_graph": "off", "elastic": False, "min_workers": 2, "max_restarts": 4, "hang_timeout": 33.0,
    "rebalance": True, "grace": 45.0, "profile": True,
    "nodes": "1:2", "rendezvous": "localhost:29500", "join_timeout": 44.0, "machine_timeout": 21, "sync_batchnorm": True,
}  # fmt: skip
"""A value of its own for every option that a resumed run keeps."""


def spec_of(asked: Asked) -> dict:
    return {**asked.spec.record(), "threads": asked.threads, "options": asdict(asked.options)}


def begun(**said) -> dict:
    return spec_of(Asked.of("digits", {"strategy": "ddp", "workers": 2, **said}, {}, OUT))


def test_a_resumed_run_keeps_every_option():
    told = {
        "epochs": 3,
        "horizon": 500,
        "batch_size": 96,
        "max_grad_norm": 0.5,
        "num_workers": 1,
        "precision": "bf16",
        "seed": 3,
    }
    tuned = {"activation_checkpointing": "blocks", "compress": "bf16", "bucket_mb": 2.0}
    before = begun(**OTHER, **told, **tuned, settings={"width": "32"}, threads=2)
    again = Asked.of("digits", {"resume": True}, before, OUT)
    for name, value in {**OTHER, "workers": 2}.items():
        if name != "shards":  # looked up when the run is planned
            assert getattr(again.options, name) == value, name
    assert asdict(again.options.tuning) == asdict(Tuning(**tuned))
    assert again.spec.record() == {name: before[name] for name in again.spec.record()}
    assert again.threads == 2
    assert again.notes == ()


def test_every_option_is_tried_above():
    from dataclasses import fields

    fitted = {"strategy", "workers", "servers", "out", "resume", "lead", "secret_file"}
    overrides = {"seed", "precision", "micro_batch", "num_workers"}
    assert {one.name for one in fields(RunOptions) if shown(one)} == set(OTHER) | fitted | overrides


def test_what_is_given_again_wins_and_a_flag_can_be_switched_off():
    before = begun(**OTHER)
    off = {name: False for name, value in OTHER.items() if value is True}
    again = Asked.of("digits", {"resume": True, **off, "elastic": True, "keep": 1, "nodes": "1"}, before, OUT)
    assert {name: getattr(again.options, name) for name in off} == off
    assert (again.options.elastic, again.options.keep, again.options.rendezvous) == (True, 1, None)


def test_an_end_that_is_given_again_replaces_the_other_kind_of_end():
    before = begun(epochs=3)
    assert Asked.of("digits", {"steps": 9}, before, OUT).spec.epochs is None
    assert Asked.of("digits", {}, before, OUT).spec.epochs == 3


def test_fewer_workers_than_were_needed_are_not_refused():
    before = begun(min_workers=2, shards=2)
    again = Asked.of("digits", {"strategy": "single"}, before, OUT)
    assert (again.options.workers, again.options.min_workers) == (1, 1)
    assert any("--min-workers 2" in note for note in again.notes)
    with pytest.raises(InputError, match="--min-workers is 3"):
        Asked.of("digits", {"min_workers": 3}, before, OUT)


def test_options_of_another_strategy_are_refused_where_they_are_asked_for():
    with pytest.raises(InputError, match="--local-steps is an option of local-sgd"):
        Asked.of("digits", {"local_steps": 3}, {}, OUT)


def test_a_spec_and_its_options_are_made_of_the_same_task():
    asked = Asked.of("digits", {"seed": 4}, {}, OUT)
    assert asked.spec.overrides == {"seed": 4}
    assert asked.options == replace(RunOptions(out=OUT), seed=4)
    assert isinstance(asked.spec, TrainSpec)


FILE = {
    "strategy": "fsdp",
    "workers": 4,
    "fsdp_dtype": "bf16",
    "shards": 4,
    "steps": 9,
    "settings": {"width": "8"},
}


@pytest.mark.parametrize(
    ("given", "found", "notes"),
    [
        ({}, ("fsdp", 4, "bf16", 9, None), 0),
        ({"workers": 2}, ("fsdp", 2, "bf16", 9, None), 0),
        ({"strategy": "ddp"}, ("ddp", 4, "fp32", 9, None), 1),
        ({"strategy": "single"}, ("single", 1, "fp32", 9, None), 2),
        ({"epochs": 2}, ("fsdp", 4, "bf16", None, 2), 0),
        ({"strategy": "single", "epochs": 2}, ("single", 1, "fp32", None, 2), 2),
    ],
)
def test_the_command_line_wins_over_a_file(given, found, notes):
    asked = Asked.together("digits", FILE, {**given, "settings": {"depth": "2"}}, {}, OUT)
    options, spec = asked.options, asked.spec
    assert (options.strategy, options.workers, options.tuning.fsdp_dtype, spec.steps, spec.epochs) == found
    assert options.shards == 4
    assert spec.settings == {"width": "8", "depth": "2"}
    assert len(asked.notes) == notes
    assert all(note.startswith("the file has") for note in asked.notes)


def test_workers_of_a_file_are_fitted_to_the_strategy_of_the_command_line():
    asked = Asked.together("digits", {"workers": 2}, {"strategy": "single"}, {}, OUT)
    assert (asked.options.workers, len(asked.notes)) == (1, 1)


def test_what_is_left_out_of_a_file_is_noted():
    asked = Asked.together("digits", {"strategy": "ps", "servers": 2}, {"strategy": "ddp"}, {}, OUT)
    assert asked.notes == ("the file has --servers 2, which --strategy ddp has no use for: it is left out.",)
    asked = Asked.together("digits", {"workers": 2}, {"strategy": "ddp=2,fsdp=2"}, {}, OUT)
    assert asked.notes == ("the file has 2 workers; --strategy ddp=2,fsdp=2 goes on with 4 here.",)


@pytest.mark.parametrize(
    ("file", "given", "words"),
    [
        ({"strategy": "single", "workers": 2}, {}, "single is one process, but 2 workers"),
        ({"strategy": "single", "workers": 2}, {"seed": 1}, "single is one process, but 2 workers"),
        (FILE, {"workers": 9}, "9 workers for 4 shards"),
        (FILE, {"strategy": "single", "workers": 2}, "single is one process, but 2 workers"),
        (FILE, {"local_steps": 2}, "--local-steps is an option of local-sgd"),
        (FILE, {"strategy": ""}, "unknown strategy ''"),
        ({"strategy": ""}, {}, "unknown strategy ''"),
        ({}, {"strategy": "ddp=\u0662"}, "unknown strategy"),
    ],
)
def test_what_cannot_be_is_refused_whoever_says_it(file, given, words):
    with pytest.raises(InputError, match=words):
        _ = Asked.together("digits", file, given, {}, OUT).options.processes

"""A file of options says what the command line could, by the same names."""

import json

import pytest

from paceline.cli.config_file import read_config
from paceline.errors import InputError
from paceline.option_fields import known_options
from paceline.training.options import RunOptions

SAID = {
    "task": "digits",
    "strategy": "fsdp",
    "workers": 4,
    "save_every": "2epochs",
    "hang_timeout": 90.0,
    "compile": True,
    "fsdp_dtype": "bf16",
    "batch_size": 64,
    "settings": {"lr": "0.1", "name": "x"},
}
FILES = {
    "a.toml": """
task = "digits"
strategy = "fsdp"
workers = 4
save-every = "2epochs"
hang_timeout = 90
compile = true
fsdp_dtype = "bf16"
batch-size = 64
[settings]
lr = 0.1
name = "x"
""",
    "a.yaml": """
task: digits
strategy: fsdp
workers: 4
save_every: 2epochs
hang-timeout: 90
compile: yes
tuning:
  fsdp_dtype: bf16
batch_size: 64
settings: {lr: 0.1, name: x}
""",
}


@pytest.mark.parametrize("name", FILES)
def test_toml_and_yaml_say_the_same(name, tmp_path):
    (tmp_path / name).write_text(FILES[name])
    assert read_config(tmp_path / name) == SAID


def test_a_spec_of_a_run_says_what_it_was_asked_for(tmp_path):
    options = {
        **known_options(RunOptions),
        "strategy": "fsdp",
        "workers": 2,
        "shards": 2,
        "shards_from": "workers",
    }
    options |= {
        "out": "runs/a",
        "resume": True,
        "seed": 5,
        "tuning": {"fsdp_dtype": "bf16", "compress": "none"},
    }
    spec = {"task": "digits", "steps": 9, "overrides": {"precision": "bf16"}, "threads": 1, "settings": {}}
    (tmp_path / "spec.json").write_text(json.dumps({**spec, "options": options}, default=str))
    found = read_config(tmp_path / "spec.json")
    found.pop("settings", None)
    assert found == {
        "strategy": "fsdp",
        "workers": 2,
        "fsdp_dtype": "bf16",
        "task": "digits",
        "steps": 9,
        "threads": 1,
        "precision": "bf16",
        "seed": 5,
    }


def test_what_a_run_was_told_against_its_task_is_told_again(tmp_path):
    told = {
        "precision": "fp32",
        "seed": 0,
        "num_workers": 0,
    }  # what a run has where neither task nor user say a word
    (tmp_path / "spec.json").write_text(json.dumps({"options": {}, "overrides": told}))
    assert read_config(tmp_path / "spec.json") == told


def test_numbers_of_yaml_are_numbers(tmp_path):
    (tmp_path / "a.yml").write_text(
        "max_grad_norm: 1e-1\nouter-lr: 7E-1\nbucket_mb: 1e1\nsettings: {lr: 1e-3}"
    )
    found = read_config(tmp_path / "a.yml")
    assert found == {"max_grad_norm": 0.1, "outer_lr": 0.7, "bucket_mb": 10.0, "settings": {"lr": "1e-3"}}


def test_a_merge_of_yaml_is_no_name_that_stands_twice(tmp_path):
    (tmp_path / "a.yaml").write_text("settings: {one: &a {x: 1}, two: {<<: *a, x: 2}}")
    assert read_config(tmp_path / "a.yaml") == {"settings": {"one": '{"x": 1}', "two": '{"x": 2}'}}


def test_capitals_and_a_mark_in_front_do_not_matter(tmp_path):
    (tmp_path / "A.TOML").write_bytes(b"\xef\xbb\xbfworkers = 2\n")
    assert read_config(tmp_path / "A.TOML") == {"workers": 2}


def test_an_unknown_name_is_told_each_known_one_once(tmp_path):
    (tmp_path / "a.toml").write_text("worker = 2")
    with pytest.raises(InputError) as caught:
        read_config(tmp_path / "a.toml")
    known = str(caught.value).partition("Known: ")[2].split(", ")
    assert len(known) == len(set(known))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "worker = 2", "unknown option 'worker'. Did you mean 'workers'?"),
        ("a.toml", "workers = 'two'", "--workers is 'two', but must be a whole number."),
        ("a.toml", "strategy = 3", "--strategy is 3, but must be text."),
        ("a.toml", "hang_timeout = nan", "--hang-timeout is nan"),
        ("a.toml", "schedule = '1b1f'", "unknown --schedule '1b1f'. Did you mean '1f1b'?"),
        ("a.toml", "settings = 3", "settings is 3, but must be a table"),
        ("a.toml", "[data]\nworkers = 2", "unknown option 'data'"),
        ("a.toml", "workers =", "Invalid value"),
        ("a.yaml", "a: [", "expected"),
        ("a.yaml", "- 3", "holds no names with values"),
        ("a.json", "{", "Expecting"),
        ("a.json", '{"options": 3}', "options is 3, but must be"),
        ("a.json", '{"options": {"tuning": 3}}', "options: tuning is 3, but must be"),
        ("a.json", '{"options": {}, "name": [3]}', "name is [3], but must be"),
        ("a.json", '{"options": {"worker": 2}}', "unknown option 'worker'. Did you mean 'workers'?"),
        ("a.toml", "[options]\nworker = 2", "unknown option 'worker'. Did you mean 'workers'?"),
        ("a.toml", "save-every = 2\nsave_every = 3", "save_every stands there twice"),
        ("a.json", '{"workers": 1, "workers": 2}', "workers stands there twice"),
        ("a.json", '{"options": {"workers": 2}, "workers": 3}', "workers stands there twice"),
        (
            "a.json",
            '{"options": {"seed": 5}, "overrides": {"seed": 4}}',
            "seed is 5 in options and 4 in overrides",
        ),
        ("a.yaml", "workers: 1\nworkers: 2", "workers stands there twice"),
        ("a.yaml", "settings: {lr: 1, lr: 2}", "lr stands there twice"),
        ("a.yaml", "workers: '1e1'", "--workers is '1e1', but must be a whole number."),
        (
            "a.toml",
            "[settings]\nhidden = 2020-01-01",
            "settings: hidden is datetime.date(2020, 1, 1), but must be text",
        ),
        (
            "a.toml",
            "[settings]\nhidden = 07:00:00",
            "settings: hidden is datetime.time(7, 0), but must be text",
        ),
        ("a.yaml", "settings: &a {x: *a}", "settings: x is {'x': {...}}, but must be text"),
        ("a.json", '{"out": "/tmp/x/\\ud800"}', "which no file system takes. Give another path."),
        ("a.ini", "workers = 2", "Give one that ends in .toml, .yaml or .json."),
        ("nowhere.toml", None, "cannot be read: No such file or directory."),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(name, text, words, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as caught:
        read_config(tmp_path / name)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"--config {tmp_path / name}")
    assert "\n" not in str(caught.value)

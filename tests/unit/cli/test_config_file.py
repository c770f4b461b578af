"""A file of options says what the command line could, by the same names."""

import json

import pytest

from paceline.cli.config_file import KINDS, read_config
from paceline.errors import InputError
from paceline.option_fields import known_options

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
        **known_options(*KINDS),
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
    }


def test_what_a_run_was_told_against_its_task_is_told_again(tmp_path):
    told = {
        "precision": "fp32",
        "seed": 0,
        "num_workers": 0,
    }  # what a run has where neither task nor user say a word
    (tmp_path / "spec.json").write_text(json.dumps({"options": {}, "overrides": told}))
    assert read_config(tmp_path / "spec.json") == told


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "worker = 2", "unknown option 'worker'. Did you mean 'workers'?"),
        ("a.toml", "workers = 'two'", "--workers is 'two', but must be a whole number."),
        ("a.toml", "strategy = 3", "--strategy is 3, but must be text."),
        ("a.toml", "hang_timeout = nan", "--hang-timeout is nan"),
        ("a.toml", "schedule = '1b1f'", "unknown schedule '1b1f'. Did you mean '1f1b'?"),
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
